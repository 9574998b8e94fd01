"""Finished runs on disk: a line each in ``runs.jsonl``, or a file each in the folder ``runs`` beside it.

A command leaves a file for each run that it finishes, so that a kill loses only the runs under way. When it ends, and
when the next one begins, it turns these files into lines.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import parse_json
from granite_scu.storage import provenance
from granite_scu.storage.atomic import ensure_folder, replacing
from granite_scu.storage.run_folder import finite

LOCK = ".lock"


def origin() -> dict[str, Any]:
    """Where a result is from, for its record: ``machine``, ``versions`` and ``git_revision``."""
    import torch  # late: who only reads runs need not wait for it

    from granite_scu.hardware import detection

    machine = {"cpu": detection.detect("cpu").name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"machine": machine, "versions": provenance.versions(), "git_revision": provenance.git_revision()}


class FinishedRun(NamedTuple):
    """The record of a finished run, its key, and where it is."""

    key: str
    record: dict[str, Any]
    place: str


def working_folder(text: str) -> Path:
    """The folder of finished runs that are files, given as itself or as the file that has the others' lines."""
    return Path(text.removesuffix(".jsonl"))


class RunStore:
    """The finished runs of a folder and of the file ``<folder>.jsonl``.

    Args:
        flag: that named the folder, for messages.
        folder: need not exist yet.
    """

    def __init__(self, flag: str, folder: Path) -> None:
        self.flag, self.folder, self.lines = flag, folder, Path(f"{folder}.jsonl")

    def exists(self) -> bool:
        return self.folder.exists() or self.lines.is_file()

    def read(self) -> Iterator[FinishedRun]:
        """Every finished run, those with lines first.

        Raises:
            UserError: something there is no JSON object, or cannot be read.
        """
        # The files are read first: another command may collect them meanwhile, and then they are among the lines.
        files = list(self._read_files())
        yield from self._read_lines()
        yield from (run for _, run in files)

    def collect(self) -> None:
        """Turn the files into lines; one whose run has a line already is removed. Several commands may do so at once.

        Raises:
            UserError: as ``read`` does.
        """
        if next(self.folder.rglob("*.json"), None) is None:
            return
        with FileLock(self.folder / LOCK):
            lines = {run.key: run.record for run in self._read_lines()}
            files = list(self._read_files())
            for _, run in files:
                lines.setdefault(run.key, {"key": run.key} | run.record)
            with replacing(self.lines) as temporary, temporary.open("w", encoding="utf-8") as file:
                file.writelines(map(_line, lines.values()))
            for path, _ in files:
                path.unlink(missing_ok=True)

    def _read_files(self) -> Iterator[tuple[Path, FinishedRun]]:
        for path in sorted(self.folder.rglob("*.json")):
            with suppress(FileNotFoundError):  # it has just been collected
                yield path, self._parse(str(path), path.read_bytes, path.stem)

    def _read_lines(self) -> Iterator[FinishedRun]:
        if self.lines.is_file():
            with self.lines.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    place = f"{self.lines}, line {number}"
                    yield self._parse(place, lambda line=line: line, place)

    def _parse(self, place: str, read: Callable[[], bytes], name: str) -> FinishedRun:
        """``name`` is the key of a record without one."""
        try:
            record = parse_json(read())
            return FinishedRun(str(record.get("key", name)), record, place)
        except FileNotFoundError:
            raise
        except (AttributeError, OSError, ValueError) as error:  # the first: it is no object
            raise UserError(f"{self.flag}: {place} is not the record of a run; move it away") from error


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record completely or not at all."""
    ensure_folder(path.parent)
    with replacing(path) as temporary:
        temporary.write_text(_line(record), encoding="utf-8")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(finite(record), separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
