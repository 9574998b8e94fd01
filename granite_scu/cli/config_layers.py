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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from granite_scu import hardware
from granite_scu.config import flags, settings, shipped
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.hardware import presets

log = logging.getLogger(__name__)

FLAG = "--hardware"
A_FLAG = "a flag"
"""Where a value is from that is in no file."""

SEED = "seed_everything"


@dataclass(frozen=True)
class Layer:
    """Settings from one place.

    Attributes:
        origin: a file, ``--hardware NAME`` or ``A_FLAG``.
        values: by dotted key; a text may stand for any value, in YAML.
    """

    origin: str
    values: dict[str, Any]


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
        layer = replace(of_file(str(presets.path(chosen))), origin=f"{FLAG} {chosen}")
        return replace(self, below=[*self.below, layer], preset=chosen)

    def _fitting(self) -> str:
        """The preset of this machine. Loads torch."""
        values = self.values
        accelerator = str(values.get("trainer.accelerator", "auto"))
        if accelerator != "auto":  # whoever leaves it open gets the CPU's preset where there is no GPU
            accelerator = hardware.resolve_accelerator(accelerator)
        device = hardware.detect(accelerator)
        gpus = values.get("run.gpus")
        if device.kind == "cuda" and (values.get("run.multi_gpu") if gpus is None else gpus != 1):
            device = hardware.least_capable(hardware.detect_all())
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
            found[SEED] = int(os.environ.setdefault("PL_GLOBAL_SEED", str(secrets.randbelow(2**32))))
        return found

    @property
    def given(self) -> list[str]:
        """Dotted keys that the user gave a value; those of a preset, and of our layer for little memory, are not."""
        origins = self.origins
        return [k for k, v in self.values.items() if v not in (None, "null") and not _is_for_a_card(origins[k])]

    def request(self) -> Request:
        """The request, its preset applied, without a look at what it names.

        Raises:
            UserError: no such preset, or a value that its setting cannot have.
        """
        layers = self.with_preset()
        return Request.from_dotted(layers.values, layers.preset, layers.given)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Have a refusal name its setting by flag or key, and the file that has it: of several any could be meant.

        A message begins with what it is about. The file of ``--test-run`` its user never named, and it is not named.
        """
        try:
            yield
        except UserError as error:
            subject, colon, rest = str(error).partition(": ")
            name, *value = subject.split(" ", 1)
            key = flags.KEYS.get(name, name.removeprefix("--"))
            if key in flags.HINTS or key in flags.SETTINGS or key == SEED:
                layers = self.with_preset() if self.asked_preset in presets.PRESETS else self
                origin = layers.origins.get(key, A_FLAG)
                shown = f"--{key}" if self.dotted else flags.NAMES.get(key, f"--{key}")
                unnamed = origin == A_FLAG or Path(origin).resolve() == shipped.TEST_RUN.resolve()
                error.args = (" ".join([shown, *value]) + ("" if unnamed else f" (in {origin})") + colon + rest,)
            raise


def _is_for_a_card(origin: str) -> bool:
    return origin.startswith(f"{FLAG} ") or Path(origin).resolve() == shipped.folder().resolve() / "qlora.yaml"


def of_file(name: str) -> Layer:
    """The settings that ``--config`` names: of a file, of one that comes along, or in YAML on the command line.

    Raises:
        UserError: there is no such file, it is no YAML, or has a setting that there is not.
    """
    name = shipped.find(name)
    try:
        is_there = Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # no path at all: too long for one, a stranger's home, a null
        is_there = False
    if is_there:
        text, origin = _read(name), name
    else:
        text, origin = name, A_FLAG
        if ": " not in name and not name.startswith("{"):
            along = ", ".join(sorted(path.stem for path in shipped.folder().glob("*.yaml")))
            raise UserError(f"--config {name}: there is no such file, and none of that name comes along ({along})")
    root = _checked(name, text)
    content = _of_today(name, parse(text))
    values = dict(_leaves(content))
    for key, value in values.items():
        check_key(key, origin, _line(root, key), value)
    return Layer(origin, values)


def of_group(group: str, text: str) -> dict[str, Any]:
    """The settings of a group that is given whole, as a mapping in YAML or a file that holds one, by dotted key."""
    content = parse(text) if ": " in text or not Path(text).expanduser().is_file() else parse(_read(text))
    return {f"{group}.{name}": value for name, value in content.items()} if isinstance(content, dict) else {group: text}


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
        where = f"--{key}" if origin == A_FLAG else f"{key} (in {origin})"
        raise UserError(f"{where}: must be a mapping of settings, and is {reprlib.repr(value)}")
    if key in flags.HINTS or key == SEED:
        return
    is_flag = origin == A_FLAG
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
    raise UserError(f"--config {origin}{line}: there is no setting {key}{meant}")


def _line(root: yaml.Node, key: str) -> str:
    """Where in a YAML file a key stands, as ``:7``; nothing where it cannot be told."""
    found, line = root, ""
    for name in key.split("."):
        for inner, value in found.value if isinstance(found, yaml.MappingNode) else ():
            if inner.value == name:
                found, line = value, f":{inner.start_mark.line + 1}"
                break
    return line


_LARGEST = 10_000
"""Entries of a configuration, each alias counted as what it stands for: a few hundred are in the largest of ours."""

_MOST_DIGITS = 400
"""Of a whole number; Python converts none of more than some thousands."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The reader that jsonargparse takes, whose YAML is a little wider than that of the one in Python."""


class _WithoutDates(_LOADER):
    """Reads what looks like a date as a text, as jsonargparse does; there is no 31st of February."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in _LOADER.yaml_implicit_resolvers.items()
    }


_TAG = "tag:yaml.org,2002:"
_PLAIN: dict[str, type[yaml.Node] | tuple[type[yaml.Node], ...]] = {
    **{"map": yaml.MappingNode, "seq": yaml.SequenceNode},
    **dict.fromkeys(("str", "int", "float", "bool", "null", "merge", "timestamp"), yaml.ScalarNode),
}
"""What a setting may be, and as which node it is written."""

_DEEPEST = 20
"""Mappings and lists inside one another. Settings have four."""


GONE = {"target_kl": "kl:KL", "cpr_bound": "cpr:CPR", "cpr_warmup": "cpr:CPR"}
"""Settings of ``control`` that runs of 0.1 have in their files, and the laws in research/ that have them now."""

_USUAL = {"strategy": "auto", "devices": 1, "num_nodes": 1, "check_val_every_n_epoch": 1, "inference_mode": True,
          "use_distributed_sampler": True, "enable_autolog_hparams": True}  # fmt: skip
"""Defaults of Lightning's Trainer that runs of 0.1 have in their files; of its other settings they are null or 0."""


_CHANGED = ("control", "trainer")


def _of_today(name: str, content: Any) -> Any:
    """What a file holds; where an earlier version wrote it, without what is no more.

    Raises:
        UserError: such a setting has a value.
    """
    groups = content if isinstance(content, dict) else {}
    control, trainer = (dict(groups[name]) if isinstance(groups.get(name), dict) else {} for name in _CHANGED)
    gone = {name: control.pop(name) for name in sorted(GONE.keys() & control.keys())}
    for setting, value in gone.items():
        if value is not None:
            law = f"--controller research.laws.{GONE[setting]} and --controller-args {setting}={value}"
            raise UserError(f"--config {name}: control.{setting} is no setting any more; take it out, and give {law}")
    unset = [name for name, value in trainer.items() if not value or value == _USUAL.get(name)]
    for setting in unset:
        if f"trainer.{setting}" not in flags.HINTS:
            gone[setting] = trainer.pop(setting)
    if isinstance(batches := trainer.get("limit_val_batches"), float) and batches.is_integer():
        gone["limit_val_batches"], trainer["limit_val_batches"] = batches, int(batches)
    changed = {name: group for name, group in zip(_CHANGED, (control, trainer), strict=True) if group or name in groups}
    return {**groups, **changed} if gone else content


def check_plain(path: Path, asked: Collection[str] = ()) -> dict[str, Any]:
    """The configuration that lies in a run folder, which may name no code: a folder may come from anybody.

    Settings of Lightning's Trainer may name classes and functions of any module, which are then imported and called.
    So may the controller. In a file that the user gives with ``--config`` they may.

    Args:
        path: of the file.
        asked: dotted keys that the user gives a value; the file's own is not taken.

    Raises:
        UserError: a setting that is neither a number, a switch nor a plain word, or is in none of our groups.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no file")
    text = _read(str(path))
    _checked(str(path), text)
    content: dict[str, Any] = parse(text)
    for group, inside in content.items():
        if group == "seed_everything":
            continue
        if not isinstance(inside, dict) or group not in flags.SETTINGS:
            raise UserError(f"{path}: {group} is no group of settings; the file is not as a run has written it")
        law = str(inside.get("controller")) if group == "control" else ""
        if ":" in law and "control.controller" not in asked:
            raise UserError(
                f"{path}: control.controller names code, which a run folder may not; where you trust it, add "
                f"--controller {law}"
            )
        for name, value in inside.items() if group == "trainer" else ():
            if isinstance(value, list | dict) or (isinstance(value, str) and not re.fullmatch(r"[\w:+-]*", value)):
                raise UserError(
                    f"{path}: trainer.{name} names code, which a run folder may not; take it out of the file and, "
                    "where it is yours, give a file that has it with --config"
                )
    return content


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: is no YAML in UTF-8: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror}") from error


def _checked(path: str, text: str) -> yaml.MappingNode:
    """The nodes of a file of settings. Raises UserError where it is none, or has a key twice, or hides something."""
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        what = "; ".join(" ".join(words.split()) for words in (error.context, error.problem) if words)
        raise UserError(f"--config {path}: is no YAML{_place(error.problem_mark)}: {what}") from error
    except RecursionError as error:
        raise UserError(f"--config {path}: is nested deeper than any setting is") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: is no YAML in UTF-8: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        what = "is empty" if root is None else "holds no mapping"
        raise UserError(f"--config {path}: {what}; it must hold groups of settings, as data: {{batch_size: 4}}")
    if _size(root, {}, _DEEPEST) > _LARGEST:
        raise UserError(
            f"--config {path}: is nested deeper than {_DEEPEST} levels, or has more than {_LARGEST:,} entries once its "
            "aliases (*name) are followed"
        )
    for node in _nodes(root):
        kinds = _PLAIN.get(node.tag.removeprefix(_TAG), ())
        if not isinstance(node, kinds):
            where = f"--config {path}: {node.tag.replace(_TAG, '!!')}{_place(node.start_mark)}"
            raise UserError(f"{where}: is no plain value, as settings are: numbers, texts, switches and lists of them")
    for number in _nodes(root):
        if number.tag == "tag:yaml.org,2002:int" and len(number.value) > _MOST_DIGITS:
            digits = f"a number of {len(number.value):,} digits"
            raise UserError(f"--config {path}: has {digits}{_place(number.start_mark)}; correct it")
    for number in _octals(root):
        raise UserError(
            f"--config {path}: {number.value}{_place(number.start_mark)} is {int(number.value, 8)} to YAML, which "
            "reads what begins with 0 as octal; write it without the 0"
        )
    for key in _repeated(root):
        place = _place(key.start_mark)
        raise UserError(f"--config {path}: {key.value} comes twice{place}, and what stands under the first is lost")
    try:
        parse(text)
    except ValueError as error:
        raise UserError(f"--config {path}: has a value that is none: {' '.join(str(error).split())}") from error
    return root


def _place(mark: yaml.Mark | None) -> str:
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _inside(node: yaml.Node) -> list[yaml.Node]:
    """The nodes that a mapping or a list has."""
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """All nodes, each once however many aliases it has."""
    open_nodes, seen = [root], set()
    while open_nodes:
        node = open_nodes.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            open_nodes += _inside(node)


def _size(node: yaml.Node, known: dict[int, float], levels: int) -> float:
    """Nodes below one, and itself, with aliases followed; infinite where one stands for what it is in, or lies deeper
    than so many levels."""
    if id(node) not in known:
        known[id(node)] = math.inf  # as long as it is being counted
        if levels:
            known[id(node)] = 1 + sum(_size(part, known, levels - 1) for part in _inside(node))
    return known[id(node)]


def _octals(root: yaml.Node) -> Iterator[yaml.Node]:
    """Numbers such as 010, which is 8 in YAML 1.1 and ten to nearly everybody."""
    return (node for node in _nodes(root) if node.tag == "tag:yaml.org,2002:int" and re.match(r"[-+]?0\d", node.value))


def _repeated(root: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Keys that their mapping has had before: of these YAML's loaders keep the last in silence. ``<<`` may repeat."""
    for node in _nodes(root):
        if isinstance(node, yaml.MappingNode):
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge")]
            names = [(key.tag, key.value) for key in keys]
            yield from (key for place, key in enumerate(keys) if names[place] in names[:place])


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
    first, *rest = yaml.safe_dump(setting, sort_keys=False, allow_unicode=True, width=1000).splitlines()
    return [first + (f"  # {origin}" if origin else ""), *rest]


def _leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict) and prefix.count(".") < 2:  # deeper mappings are values: arguments of a class
        for name, value in content.items():
            yield from _leaves(value, f"{prefix}{name}.")
    else:
        yield prefix.removesuffix("."), content


def parse(text: str) -> Any:
    """The value of a text in YAML, which may be anything; dates are texts.

    Raises:
        ValueError: it has none.
    """
    try:
        return yaml.load(text, Loader=_WithoutDates)
    except (LookupError, ArithmeticError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(str(error)) from error
