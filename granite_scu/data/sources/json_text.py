"""JSON that is read a value at a time: a list of any length takes no more memory than its longest value."""

import json
import re
from pathlib import Path
from typing import Any

from granite_scu.config.errors import UserError
from granite_scu.data.sources import files


def unambiguous(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which takes the last of two fields of one name in silence otherwise."""
    record = dict(fields)
    if len(record) < len(fields):
        names = [name for name, _ in fields]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice in an object")
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=unambiguous)
_SPACE = re.compile(r"[ \t\n\r]*")
_LONGEST_WORD = 12
"""Characters of the longest escape of JSON, ``\\ud83d\\ude00``: where it is cut, the error is at its beginning."""


class JsonText:
    """A file of JSON, parsed a value at a time; what is held of it is a value and the piece that is read.

    The datasets library, and the standard one's ``json.load``, hold a list as a whole.

    Args:
        path: of the file.
        encoding: of its characters.

    Attributes:
        line: at which the next value begins, once ``sign`` was asked for.
    """

    def __init__(self, path: Path, encoding: str) -> None:
        self.path = path
        self.line = 1
        self._at = 0
        self._pieces = files.decoded(path, encoding)
        self._text = ""
        self._passed = 0  # characters of the line that the text begins in, before it

    def sign(self) -> str:
        """The next character that is no white space; an empty text at the end of the file."""
        while True:
            end = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            self._pass_to(end)
            if end < len(self._text):
                return self._text[end]
            if not self._read():
                return ""

    def take(self, sign: str) -> bool:
        """Pass over a sign, where that is the next one; whether it was."""
        found = self.sign() == sign
        self._at += found
        return found

    def value(self) -> Any:
        """The value that begins here. Raises UserError where it is none."""
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if self._may_be_cut(error) and self._read():
                    continue
                raise self._refusal(error) from error
            self._pass_to(end)
            return found

    def _pass_to(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _read(self) -> bool:
        """Read on, as much again as is held, so that a long value is tried a few times only; False at the end."""
        held = self._text[self._at :]
        if len(held) > files.LONGEST_LINE:
            raise UserError(
                f"--data-dir {self.path}:{self.line}: a record of more than {files.LONGEST_LINE:,} characters, "
                "which is read at once, or quotes that do not end; give long texts as files of their own (.txt)"
            )
        parts, length = [held], len(held)
        while length <= 2 * len(held) and (piece := next(self._pieces, "")):
            parts.append(piece)
            length += len(piece)
        if length == len(held):
            return False
        self._passed = self._column(self._at)
        self._text, self._at = "".join(parts), 0
        return True

    def _may_be_cut(self, error: Exception) -> bool:
        """Whether it may be JSON when more is read: a text that has no end, or an error at the very end."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _LONGEST_WORD

    def _refusal(self, error: Exception) -> UserError:
        if not isinstance(error, json.JSONDecodeError):
            return not_json(f"{self.path}:{self.line}", str(error))
        line = self.line + self._text.count("\n", self._at, error.pos)
        return not_json(f"{self.path}:{line}", f"{error.msg}, column {self._column(error.pos) + 1}")

    def _column(self, at: int) -> int:
        """Characters of the line before a place of the text."""
        line_end = self._text.rfind("\n", 0, at)
        return at - line_end - 1 if line_end >= 0 else at + self._passed


def not_json(place: str, reason: str) -> UserError:
    """What a file gets that is not JSON."""
    return UserError(f"--data-dir {place}: not valid JSON ({reason}); correct the file, or write it again")
