"""From a short run without lambda to a setpoint: what ``--target-s auto`` does, but for the training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from granite_scu.control.diagnostics.fit import line
from granite_scu.control.laws.base import clip

FRACTION = 0.7
"""The share of S_free that is proposed: of all shares the one that is best over the nine tasks of docs/evidence.md, by
validation (on test text 0.8 would be). The best of each task lies between 0.26 and 1. Above 0.9, where nothing holds
back an adapter that memorises, the cost rises steeply."""

LEAST, MOST = 0.005, 0.9
"""The setpoints proposed lie between these: below, S is hardly told from its noise; above, lambda does little."""

LEAST_STEPS = 10
"""Steps of a probe below which its growth says nothing about the run."""

DOUBT = 1.0
"""What the exponent of the growth may change by between the probe and the end of the run. See ``Free``."""

TURN = 0.002
"""A rise of the validation loss over its minimum, relative to it, that counts as a turn."""


@dataclass(frozen=True)
class Point:
    """A tick of the probe: optimizer steps done, the sum of their learning rates, and what was measured."""

    step: int
    moved: float
    param_bpt: float
    data_bpt: float

    @property
    def s(self) -> float:
        """S as it was measured."""
        return self.param_bpt / (self.param_bpt + self.data_bpt)


@dataclass(frozen=True)
class Free:
    """How far S grows without lambda by the end of the run: an estimate and what it may be off by.

    How many runs end between ``low`` and ``high`` is in docs/evidence.md; DOUBT was set by 55 of them.

    Attributes:
        s: S_free.
        low: the least it is likely to be.
        high: the most.
        exponent: of the growth, ParamBPT ~ (sum of learning rates) ** exponent.
    """

    s: float
    low: float
    high: float
    exponent: float


@dataclass(frozen=True)
class Proposal:
    """A setpoint, and why."""

    target_s: float
    reason: str


def probe_steps(steps: int) -> int:
    """Optimizer steps of the probe: a tenth of the run, at least 60, and never more than the run.

    >>> [probe_steps(n) for n in (30, 400, 1000)]
    [30, 60, 100]
    """
    return min(steps, max(60, math.ceil(steps / 10)))


def extrapolate(points: Sequence[Point], moved_at_end: float) -> Free:
    """S_free at the end of the run, from the later half of the probe.

    ln ParamBPT is continued along its line over ln of the summed learning rates: Adam moves an entry by about the
    learning rate a step, so ParamBPT grows like a power of the sum, near the square. The data's bits stay what they
    last were (the mean of a quarter of the probe, at least two ticks).

    The exponent may be off by two standard errors of the slope and ``DOUBT`` more, the data's bits by two of their
    mean. And a run that memorises gains on its data ever faster: for the upper end they fall at twice the power that
    the probe shows, with its two errors.

    Raises:
        ValueError: fewer than four ticks had anything to measure.
    """
    points = [p for p in points if min(p.param_bpt, p.data_bpt, p.moved) > 0 and p.param_bpt + p.data_bpt < math.inf]
    if len(points) < 4:
        raise ValueError("the probe measured S at fewer than four ticks")
    later = points[-max(3, len(points) // 2) :]
    moved = [math.log(p.moved) for p in later]
    param = line(moved, [math.log(p.param_bpt) for p in later])
    data = line(moved, [math.log(p.data_bpt) for p in later])
    quarter = [p.data_bpt for p in points[-max(2, len(points) // 4) :]]
    data_bpt, noise = math.fsum(quarter) / len(quarter), 2 * stdev(map(math.log, quarter)) / math.sqrt(len(quarter))
    exponent, error = min(max(param.slope, 0.0), 4.0), 2 * param.error + DOUBT
    fall = 2 * max(0.0, 2 * data.error - data.slope)
    ratio = moved_at_end / points[-1].moved

    def at(power: float, off: float = 0.0) -> float:
        odds = points[-1].param_bpt / data_bpt * math.exp(clip(power * math.log(ratio) + off, -50.0, 50.0))
        return odds / (1 + odds)

    return Free(at(exponent), at(exponent - error, -noise), at(exponent + error + fall, noise), exponent)


def turn(validations: Sequence[tuple[int, float]]) -> int | None:
    """The step at which the validation loss was least, if it has risen since; None while it still falls.

    >>> turn([(10, 5.0), (20, 4.8), (30, 4.9)])
    20
    """
    if not validations:
        return None
    step, least = min(validations, key=lambda point: point[1])
    return step if validations[-1][1] > least * (1 + TURN) else None


def propose_setpoint(free: Free, steps: int, s_at_turn: float | None = None) -> Proposal:
    """A setpoint that lambda can hold: the rule, in one place.

        S* = FRACTION S_free, no more than S where the validation loss turned, clipped to [LEAST, MOST], and rounded
             down to two digits

    How uncertain S_free is does not lower it: a setpoint that S falls short of leaves the run as it would be without
    one, and says so, but one that is far too low holds back what should be learned.

    >>> propose_setpoint(Free(0.78, 0.7, 0.85, 2.0), steps=400).target_s
    0.54

    Args:
        free: how far S grows by itself.
        steps: optimizer steps of the run.
        s_at_turn: S where the validation loss of the probe began to rise; None where it did not.
    """
    limits = {
        f"{FRACTION:.0%} of S_free": FRACTION * free.s,
        **({} if s_at_turn is None else {"S where validation turned": s_at_turn}),
    }
    what, wanted = min(limits.items(), key=lambda limit: limit[1])
    target = _two_digits(min(max(wanted, LEAST), MOST))
    reason = f"S_free about {free.s:.2%} ({free.low:.2%} to {free.high:.2%}) after {steps} steps without lambda"
    if s_at_turn is not None:
        reason += f", and validation turned where S was {s_at_turn:.2%}"
    reason += f"; S* = {target:.2%}, {_bound(what, wanted)}, so that lambda has something to hold back"
    if free.high < target:
        reason += "; S will not get there: train longer, raise --learning-rate or take a smaller --prior-sigma"
    elif free.low < target:
        reason += "; S may fall short of it, and lambda then does nothing"
    return Proposal(target, reason)


def _two_digits(ratio: float) -> float:
    """Rounded down, so that what bounds it is not exceeded; what two digits express is left as it is."""
    scale = 10.0 ** (1 - math.floor(math.log10(ratio)))
    return math.floor(ratio * scale + 1e-9) / scale


def _bound(what: str, wanted: float) -> str:
    """What S* is: the smallest of its limits, or the end of the range that it is clipped to."""
    if wanted < LEAST:
        return f"the least that is proposed ({what} would be {wanted:.2%}, hardly told from noise)"
    if wanted > MOST:
        return f"the most that is proposed ({what} would be {wanted:.2%}, where lambda does little)"
    return what
