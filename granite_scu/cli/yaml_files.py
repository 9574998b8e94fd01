"""YAML files of settings: read once, and refused where they are no plain settings, or say what nobody means."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml

from granite_scu.config.errors import UserError, one_line

_LARGEST = 10_000
"""Entries of a configuration, each alias counted as what it stands for: a few hundred are in the largest of ours."""

_MAX_DIGITS = 400
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
_PLAIN = ("map", "seq", "str", "int", "float", "bool", "null", "merge")
"""What a setting may be."""

_DEEPEST = 20
"""Mappings and lists inside one another. Settings have four."""

OF_A_RUN = {"control.controller", "control.actuator", "control.measure"}
"""Keys that the file of a run has, which has all, and hardly one that somebody wrote."""


def read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: is not valid YAML in UTF-8: {one_line(error)}") from error
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror}") from error


def checked(path: str, text: str) -> yaml.MappingNode:
    """The nodes of a file of settings. Raises UserError where it is none, or says what nobody means."""
    try:
        root = yaml.compose(text, Loader=_WithoutDates)
    except yaml.MarkedYAMLError as error:
        what = "; ".join(" ".join(words.split()) for words in (error.context, error.problem) if words)
        raise UserError(f"--config {path}: is not valid YAML{_place(error.problem_mark)}: {what}") from error
    except RecursionError as error:
        raise UserError(f"--config {path}: is nested deeper than any setting is") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: is not valid YAML in UTF-8: {one_line(error)}") from error
    if not isinstance(root, yaml.MappingNode):
        what = "is empty" if root is None else "holds no mapping"
        raise UserError(f"--config {path}: {what}; it must hold groups of settings, as data: {{batch_size: 4}}")
    for number, (node, depth) in enumerate(_nodes(root)):
        if number >= _LARGEST or depth > _DEEPEST:
            raise UserError(
                f"--config {path}: is nested deeper than {_DEEPEST} levels, or has more than {_LARGEST:,} entries once "
                "its aliases (*name) are followed"
            )
        if wrong := _wrong(node):
            raise UserError(f"--config {path}: {wrong}")
    try:
        parse(text)
    except ValueError as error:
        raise UserError(f"--config {path}: has an invalid value: {one_line(error)}") from error
    return root


def _wrong(node: yaml.Node) -> str | None:
    """What is wrong with a node alone."""
    place = _place(node.start_mark)
    if node.tag.removeprefix(_TAG) not in _PLAIN:
        tag = node.tag.replace(_TAG, "!!")
        return f"{tag}{place}: is no plain value, as settings are: numbers, texts, switches and lists of them"
    if node.tag in (f"{_TAG}int", f"{_TAG}float") and isinstance(node, yaml.ScalarNode) and ":" in node.value:
        return f"has colons in a number{place}, which YAML then reads in base 60; put it in quotes"
    if node.tag == f"{_TAG}int" and isinstance(node, yaml.ScalarNode):
        if len(node.value) > _MAX_DIGITS:
            return f"has a number of {len(node.value):,} digits{place}; correct it"
        if re.match(r"[-+]?0\d", node.value):  # in YAML 1.1; to nearly everybody 010 is ten
            return (
                f"{node.value}{place} is {int(node.value, 8)} to YAML, which reads what begins with 0 as octal; write "
                "it without the 0"
            )
    seen = set()
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # YAML's loaders keep the last in silence
        name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge" else None
        if name in seen:
            return f"{key.value} comes twice{_place(key.start_mark)}, and what stands under the first is lost"
        seen |= {name} - {None}
    return None


def _place(mark: yaml.Mark | None) -> str:
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _nodes(root: yaml.Node) -> Iterator[tuple[yaml.Node, int]]:
    """All nodes and how deep they lie, each as often as aliases stand for it, which may be without end."""
    open_nodes = [(root, 1)]
    while open_nodes:
        node, depth = open_nodes.pop()
        yield node, depth
        if isinstance(node, yaml.MappingNode):
            open_nodes += [(part, depth + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            open_nodes += [(part, depth + 1) for part in node.value]


def line_of(root: yaml.Node, key: str) -> str:
    """Where in a YAML file a key stands, as ``:7``; nothing where it cannot be told."""
    found, line = root, ""
    for name in key.split("."):
        for inner, value in found.value if isinstance(found, yaml.MappingNode) else ():
            if inner.value == name:
                found, line = value, f":{inner.start_mark.line + 1}"
                break
    return line


def leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict) and prefix.count(".") < 2:  # deeper mappings are values: arguments of a class
        for name, value in content.items():
            yield from leaves(value, f"{prefix}{name}.")
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
