"""Replay: lambda(t) of a recorded run, in open loop."""

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

    Attributes, besides those of ``OpenLoop``:
        steps: optimizer steps of the recorded ticks, rising.
        strengths: lambda from each of them on, not negative.
        initial: lambda before the first of them.
    """

    steps: tuple[int, ...] = ()
    strengths: tuple[float, ...] = ()
    initial: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.steps) == len(self.strengths) > 0, "steps and strengths: must be as many, and at least one")
        require(all(a <= b for a, b in pairwise(self.steps)), "steps: must not fall")
        valid = all(0 <= strength < math.inf for strength in (self.initial, *self.strengths))
        require(valid, "strengths: must be finite and not negative")

    @property
    def initial_strength(self) -> float:
        return self.initial

    def strength(self, step: int, progress: float) -> float:
        ticks = bisect_right(self.steps, step)
        return self.strengths[ticks - 1] if ticks else self.initial
