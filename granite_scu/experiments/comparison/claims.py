"""Which runs are under way, so that of several commands on one folder of evidence none does what another one does."""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from granite_scu.experiments.comparison.evidence import Spec

SUFFIX = ".claim"

SILENT_AFTER = 600.0
"""Seconds that a claim holds without being renewed. The engine renews its own once a second; the rest is for a machine
that hangs, and for clocks that differ."""


class Claims:
    """The runs that this process has under way, as a context manager that gives up those still held.

    A claim is a file beside the run's record, made exclusively: of several processes one succeeds, on a local disk as
    on a shared folder. (The system's own locks end with their process, but not every shared folder has them between
    machines.) It holds the machine and the process, for a person to read.

    A claim is void, and is taken over, where its process was one of this machine and is gone, or where it has not been
    renewed for ``SILENT_AFTER``, as after a power cut at another machine.

    What this does not cover costs time, never evidence, for records are written whole and two of one run are equal: a
    process that was suspended so long; machines that share a name and no processes, as some containers do; clocks that
    differ by more than ``SILENT_AFTER``; two processes that find the same void claim in the same instant; a folder
    that shows files late or is merely copied back and forth. In each a run may be done twice.

    Args:
        folder: of the evidence.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: set[Path] = set()
        self._us = f"{socket.gethostname()} {os.getpid()}\n"

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, *_: Any) -> None:
        for path in set(self._held):
            self._give_up(path)

    def take(self, spec: Spec) -> bool:
        """Claim a run; whether it is ours now. One that another process holds is not, nor one that is ours already."""
        path = self._path(spec)
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_void(path):
            path.unlink(missing_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                self._held.add(path)
                file.write(self._us)
        except FileExistsError:
            return False
        return True

    def release(self, spec: Spec) -> None:
        """Give up the claim of a run whose record is there, or that failed."""
        self._give_up(self._path(spec))

    def renew(self) -> None:
        """Say that the runs are still under way."""
        for path in filter(self._is_ours, self._held):
            with contextlib.suppress(OSError):  # taken away this instant
                os.utime(path)

    def _path(self, spec: Spec) -> Path:
        """Named by the key alone: as which arm a run is done hangs on what was asked for."""
        return (self.folder / spec.file).with_name(spec.key + SUFFIX)

    def _give_up(self, path: Path) -> None:
        self._held.discard(path)
        if self._is_ours(path):
            path.unlink(missing_ok=True)

    def _is_ours(self, path: Path) -> bool:
        """Whether it still is: while we were suspended, another process may have held it for void and made its own."""
        try:
            return path.read_text(encoding="utf-8") == self._us
        except OSError:
            return False


def _is_void(path: Path) -> bool:
    """Whether a claim is there and no longer holds. One that is empty is just being made."""
    try:
        silent = time.time() - path.stat().st_mtime
        host, _, process = path.read_text(encoding="utf-8").strip().rpartition(" ")
    except FileNotFoundError:
        return False
    gone = host == socket.gethostname() and process.isdigit() and not psutil.pid_exists(int(process))
    return gone or silent > SILENT_AFTER
