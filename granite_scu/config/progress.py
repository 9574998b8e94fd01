"""How far a phase is: a bar on a terminal, a line that is written over in a notebook; a line now and then in a log file
or CI, where none can be redrawn."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from granite_scu.config.untrusted_input import printable
from granite_scu.control.units import duration

log = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between lines."""

LIVE = "shown_live"
"""Marks a log record that says what a bar shows too."""

SHOWN = "shown"
"""Marks a log record that the console has had in full."""

Item = TypeVar("Item")


UPDATE = 0.5
"""Seconds between two states of a notebook's line."""


class NotebookLine:
    """A line below a notebook's cell that is written over, where a terminal has a bar."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = -math.inf

    def show(self, text: str, at_once: bool = False) -> None:
        """Write ``text`` in its place, unless it was written over just now."""
        if time.monotonic() - self._last < UPDATE and not at_once:
            return
        self._last = time.monotonic()
        bundle = {"text/plain": text}
        if self._handle is None:
            from IPython.display import display  # there wherever a notebook is

            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def in_notebook() -> bool:
    """Whether this process is a notebook's."""
    return Console().is_jupyter


def say(line: str, console: Console) -> None:
    """A line for the console, which does not break it, and for the log file of the run."""
    line = printable(line)
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    log.info("%s", line, extra={SHOWN: True})


class Heartbeat:
    """Knows when a phase has to say how far it is, and how long the rest takes at its pace so far.

    Args:
        total: how much there is to do, in the unit that is counted.
        done: what was done before.
        every: seconds between lines.
        clock: tells the seconds.
    """

    def __init__(
        self, total: float, done: float = 0, every: float = EVERY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.every, self._clock = total, every, clock
        self._first = done
        self._begin = self._last = clock()

    def is_due(self) -> bool:
        """Whether nothing has been said for long enough."""
        return self._clock() - self._last >= self.every

    def beat(self) -> None:
        """Take note that a line was written."""
        self._last = self._clock()

    def start_pace(self, done: float) -> None:
        """Take the pace from here on: what was done before took longer than the rest will."""
        self._first, self._begin = done, self._clock()

    def set_aside(self, seconds: float) -> None:
        """Take so many seconds that have just passed for none of the pace."""
        self._begin += seconds

    def left(self, done: float, besides: float = 0.0) -> str:
        """Such as ``about 12 minutes left``; empty before there is a pace to go by, and at the end.

        Args:
            done: how much is done.
            besides: seconds that will pass at no such pace.
        """
        moved = done - self._first
        if moved <= 0 or done >= self.total:
            return ""
        seconds = (self._clock() - self._begin) * (self.total - done) / moved
        return f"about {duration(seconds + besides)} left"


@contextmanager
def advancing(phase: str, total: float, console: Console) -> Iterator[Callable[[float], None]]:
    """Gives what is told how much more is done of a phase: a bar on a terminal, or a line of a notebook; elsewhere, and
    in the log file, a line each minute.

    Args:
        phase: its name.
        total: how much there is to do.
        console: where the bar goes.
    """
    heartbeat, done = Heartbeat(total), 0.0
    line = NotebookLine() if in_notebook() and not console.quiet else None
    live = {LIVE: console.is_terminal or line is not None}
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(phase, total=total)

        def advance(more: float) -> None:
            nonlocal done
            done += more
            progress.update(task, completed=done)
            if line:
                line.show(f"{phase}: {done / total:.0%}  {heartbeat.left(done)}", at_once=done >= total)
            if heartbeat.is_due():
                heartbeat.beat()
                log.info("%s: %.0f %%  %s", phase, 100 * done / total, heartbeat.left(done), extra=live)

        yield advance


def tracked(items: Collection[Item], phase: str, console: Console, announced: bool = True) -> Iterator[Item]:
    """The items, with what ``advancing`` shows of them.

    Args:
        items: what is worked through.
        phase: its name.
        console: where the bar goes.
        announced: whether a line has the phase's name as it begins.
    """
    if announced:
        log.info("%s", phase, extra={LIVE: True})
    with advancing(phase, len(items), console) as advance:
        for item in items:
            yield item
            advance(1)
