"""Standard output and error that may end before the run does: a closed pipe, a lost terminal, a full disk."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class LastingStream:
    """A stream whose loss is told to the log file and costs nothing else: what is written afterwards goes nowhere.

    Args:
        stream: standard output or error.
        name: of it, for the log.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self._unsaid = ""

    def write(self, text: str) -> int:
        with self._kept():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._kept():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # the latter of a stream that is closed
            lost, self._stream = self._stream, open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
            with suppress(OSError, ValueError):  # what it still holds would fail again as the process ends
                os.dup2(self._stream.fileno(), lost.fileno())
            self._unsaid = f"{self._name} cannot be written any more ({error}); the run continues without it"
        if self._unsaid and _say(self._unsaid):  # at once, or as soon as there is a log file
            self._unsaid = ""


def _say(line: str) -> bool:
    """A warning in the log files alone, as the console's handler may be what has failed; False where there is none."""
    files = [each for each in logging.getLogger("granite_scu").handlers if isinstance(each, logging.FileHandler)]
    for handler in files:
        handler.handle(logging.LogRecord("granite_scu", logging.WARNING, __file__, 0, line, None, None))
    return bool(files)


@contextmanager
def robust_stdout() -> Iterator[None]:
    """Let the work inside outlive its console."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = LastingStream(sys.stdout, "standard output"), LastingStream(sys.stderr, "standard error")
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def open_what_is_closed() -> None:
    """Give a process that was started without standard streams (as by ``>&-``) some that lead nowhere.

    Otherwise the next file that is opened would get the number of one, and whatever is printed.
    """
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) < 3:
            pass
        os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
