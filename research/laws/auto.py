"""PI holds S at a setpoint, and the slope of the held-out loss moves that at every tick."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import ClassVar, NamedTuple

from granite_scu.control.laws.base import Measurement, Output, Sensor, check, clip, require
from granite_scu.control.laws.pi import PI, USABLE, PIState

AUTO = "auto"
"""In the place of a setpoint, in records: the run finds it."""

WINDOW = 8
"""Ticks whose readings are averaged. The held-out micro-batches take turns, a power of two up to this, so
that every window has each equally often: what differs between them does not look like a change."""

START = 0.2
"""S* before anything is known. S starts at 0, and takes some ticks to get there."""

SHORT, FREE = 3 * WINDOW, 0.9
"""Ticks below which a run is too short to find S*, and the S* that it starts from instead: lambda does little there."""

FROM_START = PI(setpoint=START)

MIN_READINGS = 3
"""Readings before which their scatter says nothing."""

SURE = 1000.0
"""The largest certainty: finite, so that two that contradict each other have a sum."""

MIN_ODDS, MAX_ODDS = 1e-6, 1e6
"""Bounds of S*/(1 - S*). They keep S* off 0 and 1, and decide nothing else."""


def best_scale(saved: float, slope: float) -> float:
    """The factor that a text would have an adapter scaled by; infinite where it wants ever more, 0 where it wants none.

    By the parabola V(x) = a x - c x^2 with V(0) = 0 and the V(1) and V'(1) that were measured: a = 2 V - V' and
    c = V - V', and it is highest at a / 2c.

    Args:
        saved: V(1), bits per token that the adapter saves on the text.
        slope: V'(1).
    """
    a, c = 2 * saved - slope, saved - slope
    if a <= 0:
        return 0.0
    return a / (2 * c) if c > 0 else math.inf


class Average(NamedTuple):
    """A mean over a window and its standard error."""

    mean: float
    error: float

    @property
    def certainty(self) -> float:
        """The mean over its error: |z| of 2 is hardly chance, and below 1 it may well be."""
        if not self.mean:
            return 0.0
        return clip(self.mean / self.error, -SURE, SURE) if self.error else math.copysign(SURE, self.mean)


def level(values: Sequence[float]) -> Average:
    """The mean of the newest window, of values whose micro-batches take turns.

    Its error is that of the changes since the same micro-batch's value a window before, where there are enough of
    them: how one micro-batch differs from another is no noise.
    """
    newest, changes = values[-WINDOW:], _changes(values)
    if len(changes) >= MIN_READINGS:
        return Average(fmean(newest), stdev(changes) / math.sqrt(2 * len(newest)))
    return Average(fmean(newest), stdev(newest) / math.sqrt(len(newest)) if len(newest) > 1 else math.inf)


def rise(values: Sequence[float], slopes: Sequence[float], sizes: Sequence[float]) -> Average:
    """By how much V has risen within a window but for what the adapter's size did to it.

    That is the integral of dV / dx from the size x before to that of now, by the trapezoidal rule: exact where V is a
    parabola.

    Args:
        values: readings of V, each compared with its own micro-batch's a window before.
        slopes: dV / d ln x at each reading.
        sizes: ln x at each reading.
    """
    changes = []
    for now in range(max(WINDOW, len(values) - WINDOW), len(values)):
        before, growth = now - WINDOW, sizes[now] - sizes[now - WINDOW]
        by_size = (slopes[before] * math.expm1(growth) - slopes[now] * math.expm1(-growth)) / 2
        changes.append(values[now] - values[before] - by_size)
    if len(changes) < MIN_READINGS:
        return Average(0.0, math.inf)
    return Average(fmean(changes), stdev(changes) / math.sqrt(len(changes)))


def _changes(values: Sequence[float]) -> list[float]:
    """The newest values, as far as there is one a window before, minus that."""
    first = max(WINDOW, len(values) - WINDOW)
    return [values[i] - values[i - WINDOW] for i in range(first, len(values))]


class SlopeReading(NamedTuple):
    """V and V' of a tick, with ln of the adapter's size at it: half of ln ParamBPT, which goes with the square."""

    held_out: float
    held_out_slope: float
    size: float


@dataclass(frozen=True)
class AutoSetpointState:
    """What one tick leaves to the next.

    Attributes:
        law: state of the inner loop.
        odds: S*/(1 - S*) in force.
        readings: of the last two windows, oldest first, each as ``SlopeReading``.
        turned: whether held-out text has asked for a smaller adapter before.
    """

    law: PIState
    odds: float
    readings: tuple[tuple[float, ...], ...] = ()
    turned: bool = False

    def column(self, name: str) -> list[float]:
        """One figure of all readings."""
        return [reading[SlopeReading._fields.index(name)] for reading in self.readings]


@dataclass(frozen=True)
class AutoSetpoint:
    """Lets the adapter grow while held-out text gains from it, and otherwise keeps it at the size that this text wants.

    A constant lambda has to be found by a sweep, because nothing in the training loss says when an adapter memorises.
    Held-out text says it. Scale the adapter's update by x, and let V(x) be what it saves on held-out text: the slope
    V'(1) is one backward pass away. Each tick reads V and V' on one micro-batch, and averages over the last ``WINDOW``.

    The inner loop is ``PI``. The outer one moves the odds o = S*/(1 - S*), which start at those of ``law.setpoint``.
    Two averages are weighed, each by its certainty, the mean over its standard error: V', which says whether the
    adapter should be larger; and the rise of V within a window at equal size, which says whether training still teaches
    something that held-out text gains from. Their sum over sqrt(2) is z. Noise alone gives it a standard deviation of
    about 1.2, once there are two windows of readings.

        z >  doubt:    o <- o exp(rate), not raised above ``ahead`` times the odds of S
        z < -doubt:    o <- min(o, odds of S times x*^2), x* <= 1 the best scale on held-out text

    ParamBPT goes with the square of the size, and so do the odds of S. Where |z| is within ``doubt`` S* stays. But
    until z was below -doubt once, doubt counts as a yes, and S* rises by ``first_rate``: an adapter that is kept small
    at first costs more than one that falls some ticks later. Nothing winds up: S* runs ahead of S by no more than
    ``ahead``, and falls from where S is. No constant here has the unit of a loss or of S: they say how many ticks a
    decision takes, and how sure it must be.

    Gains and bounds of the inner loop are PI's own. A tick whose slopes are not finite is held as a whole. Why this
    rule: research/mathematics.md.

    Attributes:
        law: the inner loop; its setpoint is S* at the start.
        rate: the rise of ln o in a tick, and half its largest fall below that of S.
        first_rate: the rise until held-out text has asked for a smaller adapter.
        doubt: |z| up to which it may be chance.
        ahead: the factor that S* may be ahead of S by, in odds.
    """

    refuses: ClassVar[dict[str, str]] = {
        "--actuator decoupled": "its first lambda is one for the loss",
        "--held-out-share 0": "it reads validation data, and nothing is held out",
        "--measure factors": "it works with delta alone",
    }
    setpoint: ClassVar[float | None] = None

    law: PI = FROM_START
    rate: float = 0.2
    first_rate: float = 0.5
    doubt: float = 2.0
    ahead: float = math.e

    def __post_init__(self) -> None:
        check(self, "rate", "first_rate")
        require(0 <= self.doubt < math.inf, f"doubt {self.doubt}: must be finite and not negative")
        require(1 < self.ahead < math.inf, f"ahead {self.ahead}: must be a factor above 1")

    @property
    def lambda_start(self) -> float:
        return self.law.lambda_start

    def in_a_run_of(self, ticks: int, validations: int) -> "AutoSetpoint":
        """This law, or in a run of fewer than ``SHORT`` ticks one that starts from ``FREE``: what was held back in its
        first ticks would be missing at its end. One of a single tick is refused."""
        require(ticks > 1, f"moves its setpoint at ticks, and the run has {ticks}; set a smaller --control-every")
        return replace(self, law=replace(self.law, setpoint=FREE)) if ticks < SHORT else self

    def sensor(self) -> Sensor:
        """Of V and V'."""
        from research.laws.slopes import SlopeSensor  # late: it takes seconds, and a law alone needs none

        return SlopeSensor()

    def init(self) -> AutoSetpointState:
        return AutoSetpointState(self.law.init(), self.law.setpoint / (1 - self.law.setpoint))

    def update(self, state: AutoSetpointState, measurement: Measurement) -> tuple[AutoSetpointState, Output]:
        if measurement.sensed:
            saved, slope = (measurement.sensed[f"savings_{name}"] for name in SlopeReading._fields[:2])
            if not (math.isfinite(saved) and math.isfinite(slope)):
                return state, replace(state.law.output, held=True, setpoint=self._inner(state.odds).setpoint)
            if USABLE[0] <= measurement.param_bpt <= USABLE[1]:  # there is an adapter to scale
                reading = SlopeReading(saved, slope, math.log(measurement.param_bpt) / 2)
                state = replace(state, readings=(*state.readings, tuple(reading))[-2 * WINDOW :])
                state = self._moved(state)
        law, output = self._inner(state.odds).update(state.law, measurement)
        return replace(state, law=law), replace(output, setpoint=self._inner(state.odds).setpoint)

    def _moved(self, state: AutoSetpointState) -> AutoSetpointState:
        """With the setpoint's odds after a reading."""
        if state.law.position is None or len(state.readings) < MIN_READINGS:
            return state
        saved, odds_of_s = state.column("held_out"), math.exp(state.law.position)
        slopes = state.column("held_out_slope")
        slope = level(slopes)
        z = (slope.certainty + rise(saved, slopes, state.column("size")).certainty) / math.sqrt(2)
        turned, odds = state.turned or z < -self.doubt, state.odds
        if not turned or z > self.doubt:
            raised = odds * math.exp(self.rate if turned else self.first_rate)
            odds = min(raised, max(odds, odds_of_s * self.ahead))
        elif z < -self.doubt:
            wanted = clip(best_scale(level(saved).mean, slope.mean), math.exp(-self.rate), 1.0)
            odds = min(odds, odds_of_s * wanted**2)
        return replace(state, odds=clip(odds, MIN_ODDS, MAX_ODDS), turned=turned)

    def _inner(self, odds: float) -> PI:
        return replace(self.law, setpoint=odds / (1 + odds))
