"""The lambda of a recorded run, without feedback."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from granite_scu.control.laws.base import require
from granite_scu.control.laws.open_loop import OpenLoop


@dataclass(frozen=True)
class Replay(OpenLoop):
    """Lambda is that of the last recorded tick at or before the step, and ``initial`` before the first.

    A record shows the lambda that acts from its step on. A run's own history, on the same seed, thus gives the same
    run to the bit; that of another seed has the course of lambda without the feedback. Of a law that told matrices
    apart only their mean is recorded.

    Attributes, besides those of ``OpenLoop``, which lists may be given for:
        steps: optimizer steps of the recorded ticks, rising.
        lams: lambda from each of them on, not negative.
        initial: lambda before the first of them.
    """

    steps: tuple[int, ...] = ()
    lams: tuple[float, ...] = ()
    initial: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "lams"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        require(len(self.steps) == len(self.lams) > 0, "steps and lams: must be as many, and at least one")
        require(all(a <= b for a, b in pairwise(self.steps)), "steps: must not fall")
        valid = all(0 <= lam < math.inf for lam in (self.initial, *self.lams))
        require(valid, "lams: must be finite and not negative")

    @property
    def lambda_start(self) -> float:
        return self.initial

    def at(self, step: int, progress: float) -> float:
        ticks = bisect_right(self.steps, step)
        return self.lams[ticks - 1] if ticks else self.initial
