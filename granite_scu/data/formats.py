"""The kinds of files that can be read, and the records in them: one reader each, in constant memory.

A record is a mapping of fields; its place, ``file:line`` or ``file: row``, is for messages. What the fields mean is not
known here (see ``samples``).
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from granite_scu.data import files
from granite_scu.errors import UserError

Record: TypeAlias = dict[str, Any]

TEXTS = (".txt", ".md")
"""Files that are one document each."""

DELIMITERS = (",", ";", "\t", "|")
"""Of csv files, tried in this order on the header."""

ROWS = 1024
"""Rows of a parquet file that are held at a time."""


def read_jsonl(path: Path, encoding: str, columns: tuple[str, ...]) -> Iterator[tuple[str, Record]]:
    """One JSON object a line; blank lines are passed over.

    Args:
        path: of the file.
        encoding: of its characters.
        columns: not needed here.

    Raises:
        UserError: a line that is not a JSON object.
    """
    for number, line in enumerate(files.lines(path, encoding), start=1):
        if line.strip():
            yield f"{path}:{number}", _object(line, f"{path}:{number}")


def _object(line: str, place: str) -> Record:
    try:
        record = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"--data-dir {place}: not valid JSON ({reason}); each line must be one JSON object") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise UserError(f'--data-dir {place}: a {kind}, not an object; each line must be one, as {{"text": "..."}}')
    return record


def read_csv(path: Path, encoding: str, columns: tuple[str, ...]) -> Iterator[tuple[str, Record]]:
    """Comma-separated values under a header; also with semicolons, tabs or bars, as the header shows.

    Args:
        path: of the file.
        encoding: of its characters.
        columns: names by which the header is known.

    Raises:
        UserError: a row with more or fewer fields than the header, or quotes that do not end.
    """
    csv.field_size_limit(sys.maxsize)  # the module's own limit is 128 KiB: less than many a text
    lines = files.lines(path, encoding)
    first = next(lines, "")
    named = [mark for mark in DELIMITERS if set(_fields(first, mark)) & set(columns)]
    delimiter = named[0] if named else DELIMITERS[0]
    header, number = _fields(first, delimiter), 2
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        for row in rows:
            if row and len(row) != len(header):
                raise UserError(
                    f"--data-dir {path}:{number}: {len(row)} fields under a header of {len(header)}; quote fields that "
                    f'hold the separator {delimiter!r} or a line end, and double quotes ("") inside them'
                )
            if row:
                yield f"{path}:{number}", dict(zip(header, row, strict=True))
            number = rows.line_num + 2
    except csv.Error as error:
        raise UserError(
            f"--data-dir {path}:{number}: not valid csv ({error}); close quotes, and double those inside a field"
        ) from error


def _fields(header: str, delimiter: str) -> list[str]:
    return [field.strip() for row in csv.reader([header], delimiter=delimiter) for field in row]


def read_parquet(path: Path, encoding: str, columns: tuple[str, ...]) -> Iterator[tuple[str, Record]]:
    """The rows of a parquet file.

    Args:
        path: of the file.
        encoding: not needed here.
        columns: those that are read, where the file has any of them.

    Raises:
        UserError: not a parquet file.
    """
    import pyarrow  # takes a while, and only these files need it
    from pyarrow import parquet

    if path.suffix.lower() == ".zst":
        raise UserError(f"--data-dir {path}: parquet compresses its own columns; decompress it with unzstd")
    with files.opened(path) as stream:
        try:
            table = parquet.ParquetFile(stream)
            names = table.schema_arrow.names
            wanted = [name for name in names if name in columns] or names
            number = 0
            for batch in table.iter_batches(ROWS, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
        except pyarrow.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"--data-dir {path}: not a whole parquet file ({reason}); export it again") from error


RECORDS: dict[str, Callable[[Path, str, tuple[str, ...]], Iterator[tuple[str, Record]]]] = {
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}
"""How files of records are read, by suffix."""

SUFFIXES = (*TEXTS, *RECORDS)
