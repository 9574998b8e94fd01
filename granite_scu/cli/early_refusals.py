"""What is wrong with a request that can be told at once: unknown keys, values of the wrong kind, what is not there.

Everything here is checked again where it is used. This check needs neither torch nor Lightning, which take seconds to
import, and says what the parser behind LightningCLI only says in terms of Python.
"""

import difflib
import os
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from granite_scu.cli import config_layers
from granite_scu.config import flags, settings
from granite_scu.config.errors import UserError
from granite_scu.hardware import presets
from granite_scu.storage import checkpoint_list
from granite_scu.storage.run_folder import RunFolder
from granite_scu.training.controller import build_controller
from granite_scu.training.logger_checks import check_loggers

NOT_OURS = ("seed_everything", "print_config", "json", "debug")
"""Keys and flags that are no settings of ours."""

UNKNOWN = object()
"""A value that only the parser behind LightningCLI can make."""


def refuse(arguments: list[str]) -> None:
    """Refuse a request whose fault shows at once.

    Args:
        arguments: of ``fit``, as ``script_flags.translate`` makes them.

    Raises:
        UserError: an unknown preset or key, a value of the wrong kind or out of its range, a file, a text, a model or
            a checkpoint that is not there, a text that is empty, a run folder that is not empty.
    """
    with config_layers.naming_files(arguments):
        asked = config_layers.asked_preset(arguments)
        if asked == presets.AUTO:  # which one, takes a look at the machine
            arguments = config_layers.without_preset(arguments)
        else:
            arguments, _ = config_layers.take_preset(arguments)
        config_layers.check_files(arguments)
        given = config_layers.origins_and_values(arguments)
        for key, (origin, value) in given.items():
            _check_key(key, origin, value)
        for key in config_layers.without_value(arguments):
            _check_key(key, config_layers.A_FLAG)
            if key in flags.HINTS:
                raise UserError(f"--{key}: give a value after it")
        _check_ranks()
        values = {
            key: _understood(key, flags.HINTS[key], value) for key, (_, value) in given.items() if key in flags.HINTS
        }
        check_seed(_understood("seed_everything", int | bool, given.get("seed_everything", ("", settings.SEED))[1]))
        groups = _built(values)
        if {"drift", "control", "run"} <= groups.keys():
            settings.check_budget(groups["drift"], groups["control"], groups["run"])
        if "--print_config" not in arguments:
            _check_what_is_there(groups, writes=arguments[0] not in ("validate", "test") and _is_first())


def _is_known(key: str) -> bool:
    return key in flags.HINTS or key in flags.SETTINGS or key in NOT_OURS


def _check_key(key: str, origin: str, value: Any = "") -> None:
    if _is_known(key):
        return
    is_flag = origin == config_layers.A_FLAG
    if is_flag and "." not in key:
        of_train = {flag.name.removeprefix("--"): flag.key for section in flags.SECTIONS.values() for flag in section}
        if (flag := key.replace("_", "-")) in of_train:
            raise UserError(f"fit: {key} is a flag of granite-scu train; here it is --{of_train[flag]}")
    names = [*flags.HINTS, *flags.SETTINGS]
    group, _, name = key.rpartition(".")
    if instead := settings.SET_BY_THE_RUN.get(name) if group == "trainer" else None:
        raise UserError(f"--{key} {value}: follows from other settings; use {instead}")
    alike = [known for known in names if known.partition(".")[0] == group]  # a prefix that all share tells nothing
    close = (
        difflib.get_close_matches(key, alike, 1, 0.85)
        or difflib.get_close_matches(key, names, 1, 0.75)
        or [known for known in names if known.partition(".")[2].replace("_", "") == name.replace("_", "")]
    )
    meant = f"; did you mean {'--' if is_flag else ''}{close[0]}?" if close else ""
    if is_flag:
        raise UserError(f"--{key}: there is no such setting{meant}")
    raise UserError(f"--config {origin}{_line(origin, key)}: there is no setting {key}{meant}")


_RANKS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NNODES"),
)
"""What torchrun and SLURM set."""


def _check_ranks() -> None:
    """Refuse what says which of several processes this one is, where it is no number."""
    for name in _RANKS:
        if not re.fullmatch("[0-9]{1,9}", os.environ.get(name, "0")):
            raise UserError(
                f"{name}={os.environ[name]}: must be a whole number, as torchrun and SLURM set it; unset it"
            )


def _line(path: str, key: str) -> str:
    """Where in a YAML file a key stands, as ``:7``; nothing where it cannot be told."""
    try:
        node = yaml.compose(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return ""
    found, line = node, ""
    for name in key.split("."):
        if not isinstance(found, yaml.MappingNode):
            break
        for inner, value in found.value:
            if inner.value == name:
                found, line = value, f":{inner.start_mark.line + 1}"
                break
    return line


def check_seed(seed: int | bool | None) -> None:
    """Refuse a seed that generators of random numbers do not take.

    Raises:
        UserError: it is none of 32 bits. True stands for one drawn at random.
    """
    if seed is not UNKNOWN and (seed is None or (seed is not True and not 0 <= seed < 2**32)):
        raise UserError(f"--seed {seed}: must be a whole number from 0 to {2**32 - 1}")


def _understood(key: str, hint: Any, value: Any) -> Any:
    """A value as its setting has it; ``UNKNOWN`` where that is left to the parser behind LightningCLI.

    Raises:
        UserError: it is of the wrong kind.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, str) and (str not in kinds or value.startswith("[")):
        value = _from_yaml(value)
    if value is None:
        return None if NoneType in kinds else UNKNOWN
    for kind in kinds:
        if (made := _made(kind, value)) is not UNKNOWN:
            return made
    if isinstance(value, list | dict) or str in kinds or any(get_origin(kind) is list for kind in kinds):
        return UNKNOWN
    told = [kind for kind in kinds if not (kind is int and float in kinds)]
    words = " or ".join(words for kind in told if (words := _described(kind)))
    raise UserError(f"{_named(key)} {value}: must be {words}")


def _from_yaml(text: str) -> Any:
    try:
        return config_layers.parse(text)
    except ValueError:
        return text


def _made(kind: Any, value: Any) -> Any:
    """A value of a kind, from one that may be of another; ``UNKNOWN`` where it is none."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else UNKNOWN
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        return (
            value
            if isinstance(value, list) and all(inner is Any or isinstance(each, inner) for each in value)
            else UNKNOWN
        )
    if kind in (bool, str) or isinstance(value, bool):
        return value if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) else UNKNOWN
    if kind is int and isinstance(value, int):  # 10**400 is no float
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return UNKNOWN
    if kind is int:
        return int(number) if number.is_integer() else UNKNOWN
    return number if kind is float else UNKNOWN


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "")


def _named(key: str) -> str:
    names = {flag.key: flag.name for section in flags.SECTIONS.values() for flag in section}
    return names.get(key, f"--{key}")


def _built(values: dict[str, Any]) -> dict[str, Any]:
    """The groups of settings, which refuse what is out of its range; without those that have an unknown value."""
    built: dict[str, Any] = {}
    for group, kind in flags.SETTINGS.items():
        mine = {key.partition(".")[2]: value for key, value in values.items() if key.partition(".")[0] == group}
        if UNKNOWN not in mine.values():
            built[group] = kind(**mine)
    return built


def _is_first() -> bool:
    """Whether this process writes the run folder: another one may start when the first has begun to."""
    ranks = (os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ)
    return next(ranks, "0") == "0"


def _check_what_is_there(groups: dict[str, Any], writes: bool) -> None:
    run: settings.RunConfig | None = groups.get("run")
    if run and writes:
        if run.resume:
            checkpoint_list.check_there(run.resume, run.output_dir)
        elif not run.overwrite:
            RunFolder(run.output_dir).check(overwrite=False, resuming=False)
        check_loggers(run.loggers, run.logger_offline)
    if control := groups.get("control"):
        build_controller(control)
    if data := groups.get("data"):
        check_data(data)
    if (drift := groups.get("drift")) and not (
        run and run.resume
    ):  # a run that is continued has its text in its folder
        check_general(drift)
    if base := groups.get("base"):
        settings.check_model(base.name)


def check_data(data: settings.DataConfig, begins: bool = True) -> None:
    """Refuse texts and a chat template that are not there, and texts that are empty or begin with what is wrong.

    Args:
        data: names them.
        begins: whether to read their first documents.

    Raises:
        UserError: the first of them.
    """
    from granite_scu.data.sources import read  # late: numpy

    if data.chat_template is not None:
        settings.check_template(data.chat_template)
    for source in data.sources:
        folder = Path(source.removeprefix(settings.HUB_PREFIX)).expanduser()
        if source.startswith(settings.HUB_PREFIX) and settings.is_path(str(folder)) and not folder.exists():
            raise UserError(f"--data-dir {source}: no such folder; a data set of the hub is named hf:owner/name")
        if read.is_path(source):
            read.check_readable(source)
            if begins:
                read.check_beginning(source, data.text_column, data.encoding, data.record_format)


def check_general(drift: settings.DriftConfig) -> None:
    """Refuse files of general text that are not there. Raises UserError."""
    from granite_scu.data.sources import read  # late: numpy

    with read.named_by("--general-data"):
        for source in filter(read.is_path, drift.general_files):
            read.check_readable(source)
