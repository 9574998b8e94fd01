"""What is wrong with a request that can be told at once: unknown keys, values of the wrong kind, what is not there.

Everything here is checked again where it is used. This check needs neither torch nor Lightning, which take seconds to
import, and says what the parser behind LightningCLI only says in terms of Python.
"""

import ast
import difflib
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml

from granite_scu.cli import config_layers
from granite_scu.config import flags, settings
from granite_scu.config.errors import UserError
from granite_scu.hardware import presets
from granite_scu.storage import checkpoint_list
from granite_scu.storage.run_folder import RunFolder
from granite_scu.training.controller import build_controller
from granite_scu.training.logger_checks import check_loggers

NOT_OURS = ("trainer", "seed_everything", "print_config", "json", "debug")
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
        for key, (origin, _) in given.items():
            _check_key(key, origin)
        for key in config_layers.without_value(arguments):
            _check_key(key, config_layers.A_FLAG)
            if key in flags.HINTS or key.startswith("trainer."):
                raise UserError(f"--{key}: give a value after it")
        asked_values = {key: value for key, (_, value) in given.items()}
        _check_counts(asked_values)
        _check_set_by_the_run(asked_values)
        _check_precision(asked_values)
        _check_ranks()
        hints = flags.HINTS | {key: each.kind for key, each in _trainer_settings().items() if each.kind}
        values = {key: _understood(key, hints[key], value) for key, (_, value) in given.items() if key in hints}
        check_seed(_understood("seed_everything", int | bool, given.get("seed_everything", ("", settings.SEED))[1]))
        groups = _built(values)
        if {"drift", "control", "run"} <= groups.keys():
            settings.check_budget(groups["drift"], groups["control"], groups["run"])
        if "--print_config" not in arguments:
            _check_what_is_there(groups, writes=arguments[0] not in ("validate", "test") and _is_first())


class _TrainerSetting(NamedTuple):
    """Of Lightning's Trainer: the type, None where it is more than numbers and switches, and the default."""

    kind: Any
    usual: Any


@cache
def _trainer_settings() -> dict[str, _TrainerSetting]:
    """Settings of Lightning's Trainer, as dotted keys. Read from its source: to import it takes seconds."""
    package = find_spec("lightning")
    assert package is not None and package.origin is not None
    source = Path(package.origin).with_name("pytorch") / "trainer" / "trainer.py"
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    trainer = next(node for node in classes if node.name == "Trainer")
    init = next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    found = zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    return {
        f"trainer.{argument.arg}": _TrainerSetting(
            _plain_type(argument.annotation), usual.value if isinstance(usual, ast.Constant) else None
        )
        for argument, usual in found
    }


def _plain_type(annotation: ast.expr | None) -> Any:
    """The type that an annotation names; None unless it is of numbers and switches alone."""
    kinds = {"int": int, "float": float, "bool": bool, "Optional": NoneType, "Union": None}
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)] if annotation else []
    plain = bool(names) and all(name in kinds for name in names)
    return Union[tuple(kind for name in names if (kind := kinds[name]))] if plain else None  # noqa: UP007


def _is_known(key: str) -> bool:
    group, _, rest = key.partition(".")
    if group == "trainer" and rest:
        return f"trainer.{rest.partition('.')[0]}" in _trainer_settings()
    return key in flags.HINTS or key in flags.GROUPS or group in NOT_OURS


def _check_key(key: str, origin: str) -> None:
    if _is_known(key):
        return
    is_flag = origin == config_layers.A_FLAG
    if is_flag and "." not in key:
        of_train = {flag.name.removeprefix("--"): flag.key for section in flags.SECTIONS.values() for flag in section}
        if (flag := key.replace("_", "-")) in of_train:
            raise UserError(f"fit: {key} is a flag of granite-scu train; here it is --{of_train[flag]}")
    names = [*flags.HINTS, *flags.GROUPS, *_trainer_settings()]
    group, _, name = key.rpartition(".")
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


_COUNTS = {
    "trainer.max_steps": "--max-steps",
    "trainer.accumulate_grad_batches": "--gradient-accumulation-steps",
    "trainer.limit_val_batches": "--eval-iters",
    "trainer.log_every_n_steps": "--logging-steps",
}


def _check_counts(given: dict[str, Any]) -> None:
    """Refuse a number of the Trainer's that is no count."""
    for key, flag in _COUNTS.items():
        value = _made(int, given.get(key))
        if value is not UNKNOWN and value < 1 and (key, value) != ("trainer.max_steps", -1):
            kind = "" if flag == "--max-steps" else "a whole number, "
            raise UserError(f"{flag} {value}: must be {kind}at least 1")


def _check_precision(given: dict[str, Any]) -> None:
    """Refuse a precision of Lightning's that a run does not have."""
    asked = given.get("trainer.precision")
    if asked is not None and asked not in (*settings.SHORT_PRECISIONS, "auto", "null"):
        names = ", ".join(f"{name} ({short})" for name, short in settings.SHORT_PRECISIONS.items())
        raise UserError(f"--trainer.precision {asked}: must be one of {names}")


def _check_set_by_the_run(given: dict[str, Any]) -> None:
    """Refuse another value than the usual one of a Trainer's setting that follows from settings of ours."""
    for name, instead in settings.SET_BY_THE_RUN.items():
        key = f"trainer.{name}"
        usual = settings.TRAINER_DEFAULTS.get(name, _trainer_settings()[key].usual)
        if key in given and given[key] not in (usual, str(usual), None):
            raise UserError(f"--{key} {given[key]}: follows from other settings; use {instead}")


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
        return value if isinstance(value, list) and all(isinstance(each, inner) for each in value) else UNKNOWN
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
    for group, kind in flags.GROUPS.items():
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
