"""The layers of a command line, lowest first: the preset of ``--hardware``, YAML files, flags; and which won where.

jsonargparse lays them over each other and forgets which was which; this looks at the same arguments in the same order.
"""

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import yaml

from granite_scu import hardware
from granite_scu.config import flags, shipped
from granite_scu.config.errors import UserError
from granite_scu.hardware import presets

log = logging.getLogger(__name__)

FLAG = "--hardware"
A_FLAG = "a flag"
"""Where a value is from that is in no file."""

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


def take_preset(arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments without ``--hardware``, with the preset's file in its place; and the preset's name.

    ``auto`` stands for the preset of this machine's GPU, or for that of its CPU where there is none or the other
    arguments say that the CPU is meant.

    Raises:
        UserError: no name, several of them, no such preset, or ``auto`` for a GPU that is not there.
    """
    asked = asked_preset(arguments)
    if asked is None:
        return arguments, None
    if asked == presets.AUTO:
        given = origins_and_values(without_preset(arguments))
        accelerator = str(given.get("trainer.accelerator", ("", "auto"))[1])
        if accelerator != "auto":  # whoever leaves it open gets the CPU's preset where there is no GPU
            accelerator = hardware.resolve_accelerator(accelerator)
        device = hardware.detect(accelerator)
        several, gpus = (given.get(f"run.{name}", ("", None))[1] for name in ("multi_gpu", "gpus"))
        if device.kind == "cuda" and (several if gpus is None else gpus != 1):
            device = hardware.least_capable(hardware.detect_all())
        chosen = presets.choose(device)
        if chosen == "cpu" and accelerator == "auto":
            from granite_scu.hardware.nvml import why_no_cuda  # late: it loads torch

            log.warning("%s auto: no CUDA device (%s), so the settings are those for the CPU", FLAG, why_no_cuda()[0])
    else:
        chosen = presets.named(asked)
    file = ("--config", str(presets.path(chosen)))
    return _joined([file if pair[0] == FLAG else pair for pair in _split(arguments)]), chosen


def asked_preset(arguments: list[str]) -> str | None:
    """What ``--hardware`` names, whether it exists or not; None where the flag is not there."""
    asked = [value for name, value in _split(arguments) if name == FLAG]
    if len(asked) > 1:
        raise UserError(f"{FLAG}: given {len(asked)} times; one preset fills a layer")
    if asked and not asked[0]:
        raise UserError(f"{FLAG}: expected a name; choose {presets.AUTO}, {', '.join(presets.PRESETS)}")
    return asked[0] if asked else None


def without_preset(arguments: list[str]) -> list[str]:
    """The arguments without ``--hardware``."""
    return _joined([pair for pair in _split(arguments) if pair[0] != FLAG])


def put_first(arguments: list[str]) -> list[str]:
    """The arguments of the CLI with the preset below all files, wherever its flag stands, and each file's path."""
    pairs = [
        (name, of_today(shipped.find(value))) if name == "--config" and value else (name, value)
        for name, value in _split(arguments[1:])
    ]
    return arguments[:1] + _joined(sorted(pairs, key=lambda pair: pair[0] != FLAG))


GONE = {"target_kl": "kl:KL", "cpr_bound": "cpr:CPR", "cpr_warmup": "cpr:CPR"}
"""Settings of ``control`` that runs of 0.1 have in their files, and the laws in research/ that have them now."""

_USUAL = {"strategy": "auto", "devices": 1, "num_nodes": 1, "check_val_every_n_epoch": 1, "inference_mode": True,
          "use_distributed_sampler": True, "enable_autolog_hparams": True}  # fmt: skip
"""Defaults of Lightning's Trainer that runs of 0.1 have in their files; of its other settings they are null or 0."""


_CHANGED = ("control", "trainer")

_WAS = "# "
"""Comes before a file's name where its content stands in its place."""


def of_today(file: str) -> str:
    """A file's name; where an earlier version wrote it, what it holds, below its name, without what is no more.

    Raises:
        UserError: such a setting has a value.
    """
    content = _load(file) if _is_file(file) else None
    groups = content if isinstance(content, dict) else {}
    control, trainer = (dict(groups[name]) if isinstance(groups.get(name), dict) else {} for name in _CHANGED)
    gone = {name: control.pop(name) for name in sorted(GONE.keys() & control.keys())}
    for name, value in gone.items():
        if value is not None:
            law = f"--controller research.laws.{GONE[name]} and --controller-args {name}={value}"
            raise UserError(f"--config {file}: control.{name} is no setting any more; take it out, and give {law}")
    unset = [name for name, value in trainer.items() if not value or value == _USUAL.get(name)]
    for name in unset:
        if f"trainer.{name}" not in flags.HINTS:
            gone[name] = trainer.pop(name)
    if isinstance(batches := trainer.get("limit_val_batches"), float) and batches.is_integer():
        gone["limit_val_batches"], trainer["limit_val_batches"] = batches, int(batches)
    if not gone:
        return file
    kept = {name: group for name, group in zip(_CHANGED, (control, trainer), strict=True) if name in groups}
    return f"{_WAS}{file}\n" + yaml.safe_dump(groups | kept, sort_keys=False)


def origins_and_values(arguments: list[str]) -> dict[str, tuple[str, Any]]:
    """Where from and value, by dotted key, of all that the arguments set; of a key that comes twice the last counts."""
    found: dict[str, tuple[str, Any]] = {}
    for name, value in _split(arguments):
        if name == "--config" and value is not None:
            found |= {key: (_label(value), inner) for key, inner in _leaves(_load(value))}
        elif name and name.startswith("--") and value is not None:
            key = name.removeprefix("--").removesuffix("+")
            inner = _load(value) if "." not in key else None
            nested = {f"{key}.{rest}": (A_FLAG, given) for rest, given in _leaves(inner) if isinstance(inner, dict)}
            found |= nested or {key: (A_FLAG, value)}
    return found


def given(arguments: list[str]) -> list[str]:
    """Dotted keys that the user gave a value; those of a preset, and of a layer of ours for little memory, are not."""
    found = origins_and_values(arguments).items()
    return [key for key, (origin, value) in found if value not in (None, "null") and not _is_for_a_card(origin)]


def _is_for_a_card(origin: str) -> bool:
    return origin.startswith(f"{FLAG} ") or Path(origin).resolve() == shipped.folder().resolve() / "qlora.yaml"


def without_value(arguments: list[str]) -> list[str]:
    """Names of the flags that nothing is given with, as ``--print_config``."""
    return [name.removeprefix("--") for name, value in _split(arguments) if name and value is None]


def check_files(arguments: list[str]) -> None:
    """Refuse a ``--config`` file that jsonargparse would refuse without its name, or read half of.

    Settings on the command line in place of a file, and what is no path of one, are left to jsonargparse.

    Raises:
        UserError: it is no YAML, has a key twice in a mapping, or holds no settings.
    """
    for name, value in _split(arguments):
        if name == "--config" and value is not None:
            if _is_file(value):
                _check_file(value)
            elif re.fullmatch(r"[^\s{}:]+", value) and not _exists(value):
                along = ", ".join(sorted(path.stem for path in shipped.folder().glob("*.yaml")))
                raise UserError(f"--config {value}: there is no such file, and none of that name comes along ({along})")


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
    _check_file(str(path))
    content: dict[str, Any] = _load(str(path)) or {}
    for group, settings in content.items():
        if group == "seed_everything":
            continue
        if not isinstance(settings, dict) or group not in flags.SETTINGS:
            raise UserError(f"{path}: {group} is no group of settings; the file is not as a run has written it")
        law = str(settings.get("controller")) if group == "control" else ""
        if ":" in law and "control.controller" not in asked:
            raise UserError(
                f"{path}: control.controller names code, which a run folder may not; where you trust it, add "
                f"--controller {law}"
            )
        for name, value in settings.items() if group == "trainer" else ():
            if isinstance(value, list | dict) or (isinstance(value, str) and not re.fullmatch(r"[\w:+-]*", value)):
                raise UserError(
                    f"{path}: trainer.{name} names code, which a run folder may not; take it out of the file and, "
                    "where it is yours, give a file that has it with --config"
                )
    return content


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # no path at all: too long for one, a stranger's home, a null
        return False


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # as above
        return True


def _check_file(path: str) -> None:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        what = "; ".join(" ".join(words.split()) for words in (error.context, error.problem) if words)
        raise UserError(f"--config {path}: is no YAML{_place(error.problem_mark)}: {what}") from error
    except RecursionError as error:
        raise UserError(f"--config {path}: is nested deeper than any setting is") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: is no YAML in UTF-8: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror}") from error
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


@contextmanager
def naming_files(arguments: list[str]) -> Iterator[None]:
    """Say of a refused setting which file it is in, where it is in one: of several layers any could be meant.

    Raises:
        UserError: in place of the one that was raised.
    """
    try:
        yield
    except UserError as error:
        line = with_file(str(error), arguments)
        if line == str(error):
            raise
        raise UserError(line) from error


def with_file(line: str, arguments: list[str]) -> str:
    """The line of an error, with the file of the setting that it begins with: ``--kp -1.0 (in FILE): must be ...``.

    The defaults of ``--test-run`` are in a file too, which its user never named, and neither is it named here.
    """
    keys = {flag.name: flag.key for section in flags.SECTIONS.values() for flag in section}
    subject = re.split(r": |; ", line, maxsplit=1)[0]
    words = re.findall(r"[\w.-]+", subject)
    origins = origins_and_values(arguments)
    named = (keys.get(word, word.removeprefix("--")) for word in words)
    origin = next((origins[key][0] for key in named if key in origins), A_FLAG)
    unnamed = origin == A_FLAG or Path(origin).resolve() == shipped.TEST_RUN.resolve()
    return line if unnamed else f"{subject} (in {origin}){line.removeprefix(subject)}"


def annotated(resolved: str, arguments: list[str], fitted: Collection[str]) -> str:
    """A resolved configuration as YAML, each value that is no default with a comment that says where it is from.

    A default that the data may change is a comment itself: as a value it would count as given.

    Args:
        resolved: the configuration, groups of settings, as YAML.
        arguments: of the command line it comes from, the preset's file in the place of its flag.
        fitted: dotted keys of what is fitted to the data; the settings of a controller are besides, as any of them asks
            for one.
    """
    origins = {key: origin for key, (origin, _) in origins_and_values(arguments).items()}
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


def _label(path: str) -> str:
    first, newline, _ = path.partition("\n")
    if newline and first.startswith(_WAS):
        return first.removeprefix(_WAS)
    is_preset = Path(path).parent == presets.folder() and Path(path).stem in presets.PRESETS
    return f"{FLAG} {Path(path).stem}" if is_preset else path


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


def _load(text: str) -> Any:
    """A file's content, or that of an argument; nothing where either is malformed, which jsonargparse then reports."""
    try:
        given = Path(text).expanduser().read_text(encoding="utf-8") if _is_file(text) else text
        return parse(given)
    except (OSError, ValueError):
        return None


def _split(arguments: list[str]) -> Iterator[tuple[str | None, str | None]]:
    """(name, value) of each flag; (None, word) of a word that belongs to none, (name, None) of a flag without value."""
    place = 0
    while place < len(arguments):
        word, following = arguments[place], arguments[place + 1 : place + 2]
        name, equals, value = word.partition("=")
        place += 1
        if not word.startswith("--"):
            yield None, word
        elif equals:
            yield name, value
        elif following and not following[0].startswith("--"):
            place += 1
            yield name, following[0]
        else:
            yield name, None


def _joined(pairs: Iterable[tuple[str | None, str | None]]) -> list[str]:
    """The arguments that ``_split`` took apart."""
    return [str(value if name is None else name if value is None else f"{name}={value}") for name, value in pairs]
