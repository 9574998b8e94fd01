"""How far a phase is, for a log file or CI, where no line can be redrawn."""

import time
from collections.abc import Callable

from granite_scu.control.units import duration

EVERY = 60.0
"""Seconds between lines."""


class Heartbeat:
    """Knows when a phase has to say how far it is, and how long the rest takes at its pace so far.

    Args:
        total: what there is to do, in whatever is counted.
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

    def left(self, done: float) -> str:
        """Such as ``about 12 minutes left``; empty before there is a pace to go by, and at the end."""
        moved = done - self._first
        if moved <= 0 or done >= self.total:
            return ""
        seconds = (self._clock() - self._begin) * (self.total - done) / moved
        return f"about {duration(seconds)} left"
