"""What somebody else may have written: JSON, read with one kind of error, folders, and texts for the terminal."""

import json
import re
import stat
from pathlib import Path
from typing import Any

from granite_scu.config.errors import UserError

DEEPEST = 100
"""Objects and lists inside one another. What this program writes has fewer than ten."""

SECRET_NAME = re.compile(r"(?i)token(?!i[sz])|secret|passw|credential|api_?key|access_?key|private_?key")
"""A part of what a variable or an argument is called whose value nobody else may read."""


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The value of a JSON text.

    Args:
        text: bytes are UTF-8.
        options: of ``json.loads``.

    Raises:
        ValueError: it is not UTF-8, not JSON, or nested deeper than ``DEEPEST``; whoever walks it need not fear that.
    """
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, **options)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [value]
    for _ in range(DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
        if not level:
            return value
    raise ValueError("nested too deeply")


MAX_DIGITS = 308
"""Of a whole number: the longest that is sure to fit a float, which most numbers become. Other programs write long
ones: transformers gives a tokenizer without a limit the length int(1e30)."""


def short_int(text: str) -> int:
    """``parse_int`` for whole numbers that may become floats. Raises ValueError for a longer one."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


LARGEST = 1 << 29
"""Bytes of a file that is read as a whole: the digests of twenty million documents, or half a million ticks."""

_READ_AS_A_WHOLE = (".json", ".jsonl", ".jinja", ".csv", ".log", ".md", ".yaml", ".html", ".svg", ".png", ".txt",
                    ".model")  # fmt: skip
"""How names of files end, in run folders and folders of adapters, that we or a library read so."""

_WRITTEN_IN_LINES = "documents.json"
"""Has no largest size, and no run that continues reads it."""


def read_file(path: Path) -> bytes:
    """The content of a file. What it is and how large is looked at first: of a pipe or a hole there is no end.

    Raises:
        ValueError: it is no plain file, or larger than ``LARGEST``.
        OSError: it is not there, or cannot be read.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("is no file")
    if found.st_size > LARGEST:
        raise ValueError(f"has {found.st_size:,} bytes, more than any that this program writes")
    return path.read_bytes()


def only_files(folder: Path, but: Path | None = None) -> None:
    """Refuse a folder that holds a pipe, a socket, a device or a huge text: to read one may take for ever.

    Args:
        folder: what is to be read or written; links in it are followed to what they lead to.
        but: a folder in it that is not looked at.

    Raises:
        UserError: names it.
    """
    for path in folder.rglob("*"):
        if not path.exists() or path.is_dir() or but in path.parents:
            continue
        if not path.is_file():
            raise UserError(f"{path}: is neither a file nor a folder; take it out of the folder")
        as_a_whole = path.suffix in _READ_AS_A_WHOLE and path.name != _WRITTEN_IN_LINES
        if as_a_whole and (size := path.stat().st_size) > LARGEST:
            raise UserError(f"{path}: has {size:,} bytes, more than any that this program writes; it is damaged")


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but for tab and line feed, and what turns the direction of a line."""


def printable(text: str) -> str:
    r"""A text whose control characters are written out: those of a stranger's would act on the terminal.

    >>> printable(f"a{chr(27)}[2Jb") == r"a\x1b[2Jb"
    True
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)
