"""The layers of a command line, lowest first: the preset of ``--hardware``, YAML files, flags; and which won where."""

import difflib
import logging
import math
import os
import re
import reprlib
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from granite_scu.cli.yaml_files import checked, leaves, line_of, parse, read
from granite_scu.config import flags, settings, shipped
from granite_scu.config.errors import UserError
from granite_scu.config.launcher import launched_processes
from granite_scu.config.request import Request
from granite_scu.hardware import presets
from granite_scu.training.defaults import FITTED

log = logging.getLogger(__name__)

FLAG = "--hardware"
A_FLAG = "a flag"
"""Where a value is from that is in no file."""

SEED = "seed_everything"

FITTED_TO_STEPS = ("optimizer.warmup_steps", "control.every", "run.eval_steps")
"""Of ``FITTED``, what the length of a run decides."""

NULLS = ("null", "Null", "NULL", "~")
"""How YAML writes that a setting has no value."""


def has_value(value: Any) -> bool:
    """Whether what was given for a setting is more than a null."""
    return value is not None and value not in NULLS


@dataclass(frozen=True)
class Layer:
    """Settings from one place.

    Attributes:
        origin: a file, ``--hardware NAME`` or ``A_FLAG``.
        values: by dotted key; a text may stand for any value, in YAML.
        lines: of a file, by dotted key, as ``:7``.
    """

    origin: str
    values: dict[str, Any]
    lines: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layers:
    """What a command line asks for.

    Attributes:
        below: what changes defaults: of ``--test-run``, and of the run that is continued. Lowest first.
        above: files, then flags.
        asked_preset: what ``--hardware`` names, whether it exists or not.
        preset: the preset that is among the layers.
        dotted: whether messages name settings by their dotted keys, or by flags.
    """

    below: list[Layer]
    above: list[Layer]
    asked_preset: str | None = None
    preset: str | None = None
    dotted: bool = False

    def with_preset(self) -> "Layers":
        """With the settings of the preset that was asked for.

        ``auto`` stands for the preset of this machine's GPU, or for that of its CPU where there is none or the other
        layers say that the CPU is meant.

        Raises:
            UserError: no such preset, or ``auto`` for a GPU that is not there.
        """
        if self.asked_preset is None or self.preset is not None:
            return self
        chosen = self._fitting() if self.asked_preset == presets.AUTO else presets.named(self.asked_preset)
        layer = replace(of_file(str(presets.path(chosen))), origin=f"{FLAG} {chosen}", lines={})
        return replace(self, below=[*self.below, layer], preset=chosen)

    def _fitting(self) -> str:
        """The preset of this machine. Loads torch."""
        from granite_scu.hardware import detection, machine  # late: torch

        values = self.values
        accelerator = str(values.get("trainer.accelerator", "auto"))
        if accelerator != "auto":  # whoever leaves it open gets the CPU's preset where there is no GPU
            accelerator = machine.resolve_accelerator(accelerator)
        device = detection.detect(accelerator)
        gpus = values.get("run.gpus")
        if device.kind == "cuda" and (values.get("run.multi_gpu") if gpus is None else gpus != 1):
            device = detection.least_capable(detection.detect_all())
        chosen = presets.choose(device)
        if chosen == "cpu" and accelerator == "auto":
            from granite_scu.hardware.nvml import why_no_cuda  # late: it loads torch

            log.warning("%s auto: no CUDA device (%s), so the settings are those for the CPU", FLAG, why_no_cuda()[0])
        return chosen

    @property
    def origins(self) -> dict[str, str]:
        """Where each value is from, by dotted key."""
        return {key: layer.origin for layer in (*self.below, *self.above) for key in layer.values}

    @property
    def values(self) -> dict[str, Any]:
        """The value that won, by dotted key."""
        found = {key: value for layer in (*self.below, *self.above) for key, value in layer.values.items()}
        if str(found.get(SEED)).lower() == "true":  # one drawn at random, for all processes that Lightning starts
            if launched_processes() is not None and "PL_GLOBAL_SEED" not in os.environ:
                raise UserError("--seed true: each process of a launcher's would draw another seed; give a number")
            found[SEED] = int(os.environ.setdefault("PL_GLOBAL_SEED", str(secrets.randbelow(2**32))))
        return found

    @property
    def given(self) -> list[str]:
        """Dotted keys that the user gave a value; those of a preset, and of our layer for little memory, are not.

        Nor is what ``--test-run`` has fitted to its own text and length, where the run has another; but for the rate,
        which suits its model.
        """
        origins = self.origins
        left_out = {key for key, origin in origins.items() if _is_for_a_card(origin)}
        own = {key for key, origin in origins.items() if _is_the_test_runs(origin)}
        if not own >= {"data.path", "trainer.max_steps"}:
            left_out |= own.intersection(FITTED_TO_STEPS)
        if "data.path" not in own:
            left_out |= {key for key in own.intersection(FITTED) if key.startswith(("data.", "trainer."))}
        return [key for key, value in self.values.items() if has_value(value) and key not in left_out]

    def request(self) -> Request:
        """The request, its preset applied, without a look at what it names.

        Raises:
            UserError: no such preset, or a value that its setting cannot have.
        """
        layers = self.with_preset()
        return Request.from_dotted(layers.values, layers.preset, layers.given)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Have a refusal name its setting by flag or key, and file and line that have it: any could be meant.

        A message begins with what it is about. The file of ``--test-run`` its user never named, and it is not named.
        """
        try:
            yield
        except UserError as error:
            name, *_ = re.split(r"[\s:]", message := str(error), maxsplit=1)
            key = flags.KEYS.get(name, name.removeprefix("--"))
            if key in flags.HINTS or key in flags.SETTINGS or key == SEED:
                layers = self.with_preset() if self.asked_preset in presets.PRESETS else self
                having = [layer for layer in (*layers.below, *layers.above) if key in layer.values]
                origin, line = (having[-1].origin, having[-1].lines.get(key, "")) if having else (A_FLAG, "")
                shown = f"--{key}" if self.dotted else flags.NAMES.get(key, f"--{key}")
                unnamed = origin == A_FLAG or _is_the_test_runs(origin)
                error.args = (shown + ("" if unnamed else f" (in {origin}{line})") + message.removeprefix(name),)
            raise


def _is_for_a_card(origin: str) -> bool:
    return origin.startswith(f"{FLAG} ") or Path(origin).resolve() == shipped.folder().resolve() / "qlora.yaml"


def _is_the_test_runs(origin: str) -> bool:
    return Path(origin).resolve() == shipped.TEST_RUN.resolve()


def of_file(name: str) -> Layer:
    """The settings that ``--config`` names: of a file, of one that comes along, or in YAML on the command line.

    Raises:
        UserError: there is no such file, it is not valid YAML, or has a setting that there is not.
    """
    if not name.strip():
        raise UserError("--config '': is empty; name a file, or leave it out")
    name = shipped.find(name)
    try:
        is_there = Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # no path at all: too long for one, a stranger's home, a null
        is_there = False
    if is_there:
        text, origin = read(name), name
    else:
        text, origin = name, A_FLAG
        if ": " not in name and not name.startswith("{"):
            along = ", ".join(sorted(path.stem for path in shipped.folder().glob("*.yaml")))
            raise UserError(f"--config {name}: there is no such file, and none of that name comes along ({along})")
    root = checked(name, text)
    values = dict(leaves(parse(text)))
    lines = {key: line_of(root, key) for key in values}
    for key, value in values.items():
        check_key(key, origin, lines[key], value)
    return Layer(origin, values, lines)


def check_key(key: str, origin: str, line: str = "", value: Any = "") -> None:
    """Refuse a dotted key that is no setting's.

    Args:
        key: it.
        origin: a file, or ``A_FLAG``.
        line: of the file, as ``:7``.
        value: that it was given.

    Raises:
        UserError: says which may be meant.
    """
    if key in flags.SETTINGS:
        where = f"--{key}" if origin == A_FLAG else f"{key} (in {origin}{line})"
        raise UserError(f"{where}: must be a mapping of settings, and is {reprlib.repr(value)}")
    if key in flags.HINTS or key == SEED:
        return
    is_flag = origin == A_FLAG
    names = [*flags.HINTS, *flags.GROUPS]
    group, _, name = key.rpartition(".")
    if instead := settings.SET_BY_THE_RUN.get(name) if group == "trainer" else None:
        where = f"--{key} {value}" if is_flag else f"--config {origin}{line}: {key} {value}"
        raise UserError(f"{where}: follows from other settings; use {instead}")
    alike = [known for known in names if known.partition(".")[0] == group]  # a prefix that all share tells nothing
    close = (
        difflib.get_close_matches(key, alike, 1, 0.85)
        or difflib.get_close_matches(key, names, 1, 0.75)
        or [known for known in names if known.partition(".")[2].replace("_", "") == name.replace("_", "")]
        or [known for known, flag in flags.NAMES.items() if flag == f"--{key.replace('_', '-')}"]
    )
    meant = f"; did you mean {'--' if is_flag else ''}{close[0]}?" if close else ""
    if is_flag:
        raise UserError(f"--{key}: there is no such setting{meant}")
    raise UserError(f"--config {origin}{line}: there is no setting {key}{meant}")


def annotated(resolved: str, origins: dict[str, str], fitted: Collection[str]) -> str:
    """A resolved configuration as YAML, each value that is no default with a comment that says where it is from.

    A default that the data may change is a comment itself: as a value it would count as given.

    Args:
        resolved: the configuration, groups of settings, as YAML.
        origins: of what was given.
        fitted: dotted keys of what is fitted to the data; the settings of a controller are besides, as any of them asks
            for one.
    """
    lines = ["# What has no comment is a default, and what is a comment one that the data may change."]
    for group, content in yaml.safe_load(resolved).items():
        if not isinstance(content, dict):
            lines += _commented({group: content}, origins.get(group))
            continue
        inside: list[str] = []
        for name, value in content.items():
            key = f"{group}.{name}"
            of_key = [origin for known, origin in origins.items() if f"{known}.".startswith(f"{key}.")]
            mark = "# " if not of_key and (key in fitted or group == "control") else ""
            inside += [f"  {mark}{line}" for line in _commented({name: value}, of_key[-1] if of_key else None)]
        only_comments = all(line.startswith("  # ") for line in inside)
        lines += [f"# {group}:" if only_comments else f"{group}:", *inside]
    return "\n".join(lines) + "\n"


def _commented(setting: dict[str, Any], origin: str | None) -> list[str]:
    first, *rest = yaml.safe_dump(setting, sort_keys=False, allow_unicode=True, width=math.inf).splitlines()
    if origin and rest and not first.endswith(":"):  # behind a text of several lines it would be a part of that
        return [f"# {origin}", first, *rest]
    return [first + (f"  # {origin}" if origin else ""), *rest]
