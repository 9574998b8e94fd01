"""The kinds of files that can be read, and the records in them: one reader each, in constant memory.

A record is a mapping of fields; its place, ``file:line`` or ``file: row``, is for messages. What the fields mean is not
known here (see ``samples``).
"""

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import parse_json
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
        self._column = 0  # characters of the line that were passed over
        self._pieces = files.decoded(path, encoding)
        self._text, self._at = "", 0

    def sign(self) -> str:
        """The next character that is no white space; an empty text at the end of the file."""
        while True:
            self._pass_to(_SPACE.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def take(self, sign: str) -> bool:
        """Pass over a sign, where that is the next one; whether it was."""
        found = self.sign() == sign
        self._pass_to(self._at + found)
        return found

    def value(self) -> Any:
        """The value that begins here. Raises UserError where it is none."""
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # It may be JSON when more is read: a text has no end, or the error is at the very end.
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _LONGEST_WORD
                if not (is_cut and self._read()):
                    self._pass_to(error.pos)
                    raise self.refusal(f"{error.msg}, column {self._column + 1}") from error
            except (ValueError, RecursionError) as error:
                raise self.refusal(str(error)) from error
            else:
                self._pass_to(end)
                return found

    def refusal(self, reason: str) -> UserError:
        """What a file gets that is not JSON here."""
        return UserError(
            f"--data-dir {self.path}:{self.line}: not valid JSON ({reason}); correct the file, or write it again"
        )

    def _pass_to(self, end: int) -> None:
        lines = self._text.count("\n", self._at, end)
        begin = self._text.rindex("\n", self._at, end) + 1 if lines else self._at - self._column
        self.line, self._column, self._at = self.line + lines, end - begin, end

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
        self._text, self._at = "".join(parts), 0
        return True


Record: TypeAlias = dict[str, Any]

Reader: TypeAlias = Callable[[Path, str, tuple[str, ...]], Iterator[tuple[str, Record]]]
"""Gives the records of a file, each after its place: of ``path``, by the ``encoding`` of its characters; ``columns``
are the fields that anybody wants to know."""

TEXTS = (".txt", ".md")
"""Files that are one document each."""

PARQUET = ".parquet"

DELIMITERS = (",", ";", "\t", "|")
"""Of csv files, tried in this order on the header."""

ROWS = 16
"""Rows of a parquet file that are held at a time."""

MAX_UNPACKED, MAX_TIMES = 8_000_000, 200
"""Bytes, and times the file's own size, that these may unpack to."""


_A_LINE = "each line must be one JSON object; call a file .json that is one list of them"


def read_jsonl(path: Path, encoding: str, columns: tuple[str, ...]) -> Iterator[tuple[str, Record]]:
    """One JSON object a line, or a list of messages; blank lines are passed over. A ``Reader``.

    Raises:
        UserError: a line that is not a JSON object.
    """
    for number, line in enumerate(files.lines(path, encoding), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = parse_json(line.rstrip(), object_pairs_hook=unambiguous)
        except ValueError as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise UserError(f"--data-dir {place}: not valid JSON ({reason}); {_A_LINE}") from error
        yield place, _record(record, place, _A_LINE)


def _record(value: Any, place: str, remedy: str = 'each record must be one, as {"text": "..."}') -> Record:
    """A record, or the messages of a conversation without one around them."""
    is_chat = isinstance(value, list) and all(isinstance(each, dict) and {"role", "from"} & {*each} for each in value)
    if is_chat and value:
        return {"messages": value}
    if not isinstance(value, dict):
        raise UserError(f"--data-dir {place}: a {type(value).__name__}, not an object; {remedy}")
    return value


def read_json(path: Path, encoding: str, columns: tuple[str, ...]) -> Iterator[tuple[str, Record]]:
    """A list of JSON objects, or objects one after the other; laid out over lines in any way. A ``Reader``.

    Raises:
        UserError: not JSON, something in the list that is no object, or a list that does not end.
    """
    text = JsonText(path, encoding)
    in_list = text.take("[")
    is_first = True
    while (sign := text.sign()) and not (in_list and sign == "]"):
        if in_list and not is_first and not text.take(","):
            raise text.refusal(f"{sign!r} where a comma or the end of the list must be")
        text.sign()  # the record's line is that of its first character
        is_first, place = False, f"{path}:{text.line}"
        yield place, _record(text.value(), place)
    if in_list and not text.take("]"):
        raise text.refusal("the list does not end")
    if text.sign():
        raise text.refusal("something follows the list")


def read_csv(path: Path, encoding: str, columns: tuple[str, ...]) -> Iterator[tuple[str, Record]]:
    """Comma-separated values under a header; also with semicolons, tabs or bars, as the header shows. A ``Reader``,
    whose ``columns`` are names by which the header is known.

    Raises:
        UserError: a row with more or fewer fields than the header, or quotes that do not end.
    """
    is_tsv = files.kind(path) == ".tsv"
    csv.field_size_limit(files.LONGEST_LINE)  # the module's own limit is 128 KiB: less than many a text
    lines = files.lines(path, encoding)
    number, first = next(((n, line) for n, line in enumerate(lines, start=1) if line.strip()), (1, ""))
    if not first:
        return
    try:
        header, delimiter = _header(first, f"{path}:{number}", columns, is_tsv)
        above, number = number, number + 1
        for taken, row in _csv_rows(lines, delimiter, is_tsv and delimiter == "\t"):
            if row and len(row) != len(header):
                raise UserError(
                    f"--data-dir {path}:{number}: {len(row)} fields under a header of {len(header)}; quote fields that "
                    f'hold the separator {delimiter!r} or a line end, and double quotes ("") inside them'
                )
            if row:
                # An empty field is the null that csv has no other way to write.
                yield f"{path}:{number}", {name: field or None for name, field in zip(header, row, strict=True)}
            number = above + taken + 1
    except csv.Error as error:
        raise UserError(
            f"--data-dir {path}:{number}: not valid csv ({error}); close quotes, and double those inside a field"
        ) from error


def _csv_rows(lines: Iterator[str], delimiter: str, is_tsv: bool) -> Iterator[tuple[int, list[str]]]:
    """Each row, after the number of lines so far. Raises csv.Error.

    In many a .tsv a quote is a character like others. A line that is no csv is then divided at its tabs alone, and a
    quote that would swallow fields of the next line is an error.
    """
    line = ""

    def kept() -> Iterator[str]:
        nonlocal line
        for line in lines:  # noqa: UP028
            yield line

    rows, taken = csv.reader(kept(), delimiter=delimiter, strict=True), 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if not is_tsv or "expected after" not in str(error) or rows.line_num > taken + 1:
                raise
            row = line.rstrip("\r\n").split("\t")
        if is_tsv and any("\t" in field and "\n" in field for field in row):
            raise csv.Error("a quote that begins here ends on a later line, and tabs stand between")
        taken = rows.line_num
        yield taken, row


def _header(line: str, place: str, columns: tuple[str, ...], tabbed: bool) -> tuple[list[str], str]:
    """The names of the fields and the separator: of those that find a known name, the first."""
    if "\r" in line.rstrip("\r\n"):
        raise UserError(f"--data-dir {place}: lines end in a carriage return alone; convert the file, as with mac2unix")
    marks = sorted(DELIMITERS, key=lambda mark: mark != "\t") if tabbed else DELIMITERS
    found = [(mark, [name.strip() for row in csv.reader([line], delimiter=mark) for name in row]) for mark in marks]
    small = [(mark, [name.lower() for name in names]) for mark, names in found]  # of a spreadsheet: Question, Answer
    delimiter, header = next((each for each in (*found, *small) if {*each[1]} & {*columns}), found[0])
    for name in columns[:1] if columns[0] in header else columns:
        if header.count(name) > 1:
            raise UserError(f"--data-dir {place}: several columns are called {name!r}; give each a name of its own")
    return header, delimiter


def read_parquet(path: Path, encoding: str, columns: tuple[str, ...]) -> Iterator[tuple[str, Record]]:
    """The rows of a parquet file. A ``Reader``: of other columns than ``columns`` a row has the names, for messages.

    Raises:
        UserError: not a parquet file, or a small one of which a few rows fill the memory.
    """
    import pyarrow  # takes a while, and only these files need it
    from pyarrow import parquet

    with files.opened(path) as stream:
        try:
            table = parquet.ParquetFile(stream)
            names = table.schema_arrow.names
            wanted = [name for name in names if name in columns] or names[:1]
            if twice := next((name for name in wanted if wanted.count(name) > 1), None):
                raise UserError(f"--data-dir {path}: has two columns {twice}; name one of them differently")
            every: Record = dict.fromkeys(names)
            number = 0
            for batch in table.iter_batches(ROWS, columns=wanted):
                for row in _rows(batch, path, f"rows {number + 1} to {number + batch.num_rows}"):
                    number += 1
                    yield f"{path}: row {number}", every | row
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of what is in the file
                raise
            reason = str(error).splitlines()[0]
            raise UserError(f"--data-dir {path}: not a complete parquet file ({reason}); export it again") from error


def _rows(batch: Any, path: Path, place: str) -> list[Record]:
    """The rows of a batch. Raises UserError for texts and times that are none, since pyarrow looks at them only here,
    and for too many bytes: the file may say in a few that each row is of many megabytes."""
    if batch.nbytes > max(MAX_UNPACKED, MAX_TIMES * path.stat().st_size):
        raise UserError(
            f"--data-dir {path}: {place} unpack to more than {MAX_TIMES} times the file's size, and are read at once; "
            "give long texts as files of their own (.txt)"
        )
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        reason = "bytes that are not UTF-8 in a column of texts" if isinstance(error, UnicodeDecodeError) else error
        raise UserError(f"--data-dir {path}: {place}: cannot be read ({reason}); export the file again") from error


RECORDS: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".jsonlines": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    PARQUET: read_parquet,
}
"""How files of records are read, by suffix."""

SUFFIXES = (*TEXTS, *RECORDS)
