"""Two loops: PI holds S at a setpoint, and what two texts make of the adapter moves the setpoint within the run."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from granite_scu.control.laws.base import Measurement, Output, Sensor, check, clip, require
from granite_scu.control.laws.pi import PI, PIState

PROBED_SCALE = 0.8
"""The adapter is scored at its own scale and at this share of it: far enough for a difference beyond rounding, near
enough for the slope at 1."""


class AdapterBenefit(NamedTuple):
    """Bits per token that the adapter saves over the base model, as it is and scaled down to ``PROBED_SCALE``.

    Attributes:
        held_out, held_out_scaled: on held-out text.
        training, training_scaled: on the training text that comes next.
    """

    held_out: float
    held_out_scaled: float
    training: float
    training_scaled: float


MIN_VALIDATIONS = 10
"""Validations in a run that give it the time to measure, and to move its setpoint by decades."""

ODDS = (0.01, 1e6)
"""Bounds of S*/(1 - S*). An adapter at the lower one does no harm, and can still grow within a few validations; the
upper one keeps S* off 1."""


def best_log_scale(saved: float, saved_when_scaled: float) -> float:
    """ln of the factor that would make the adapter best on a text; infinite where no finite one would.

    By the parabola V(x) = a x - c x^2 through V(0) = 0, V(PROBED_SCALE) and V(1): it is best at a / 2c.

    Args:
        saved: V(1), bits per token that the adapter saves on the text.
        saved_when_scaled: V(PROBED_SCALE), with the update scaled down to that share.
    """
    x = PROBED_SCALE
    slope = (saved_when_scaled - x * x * saved) / (x - x * x)
    bend = slope - saved
    if slope <= 0:
        return -math.inf
    return math.log(slope / (2 * bend)) if bend > 0 else math.inf


def headroom(saved: AdapterBenefit, aim: float) -> float:
    """ln of a factor by which the adapter may grow, negative where it should shrink.

    The larger of ln x*, x* the best scale on held-out text, and ln(r / aim), r that over the best scale on training
    text. Where the training text has no finite best scale, as just after a shift, r says nothing.
    """
    held_out = best_log_scale(saved.held_out, saved.held_out_scaled)
    training = best_log_scale(saved.training, saved.training_scaled)
    return max(held_out, held_out - training - math.log(aim)) if math.isfinite(training) else held_out


@dataclass(frozen=True)
class CascadeState:
    """What one tick leaves to the next.

    Attributes:
        law: state of the inner loop.
        odds: S*/(1 - S*) in force.
    """

    law: PIState
    odds: float


@dataclass(frozen=True)
class Cascade:
    """Lets the adapter grow until held-out text would have it smaller, and by far smaller than the training text would.

    A constant lambda has to be found by a sweep because nothing in the training loss says when the adapter memorises.
    Two texts do: scale the adapter, and see at which scale it would save most on held-out text and at which on the
    training text that comes next. As the adapter learns by heart, the training text asks for ever more of it and
    held-out text for less; where text is never repeated the two ask for nearly the same. A scaled adapter costs a
    forward pass, not a run.

    The inner loop is ``PI``. The outer one acts at the first tick after a validation, on the setpoint's odds
    o = S*/(1 - S*), which start at those of ``start``. With x* the best scale on held-out text, and r that over the
    best scale on training text:

        o <- o exp(clip(gain max(ln x*, ln(r / aim)), +- limit))

    but o is not raised above exp(limit) times the odds that S has, which it may be unable to follow. So the setpoint
    falls only where x* < 1 and r < aim. Where nothing is memorised S* runs ahead of S, and lambda goes to its lower
    bound. A tick whose savings are not finite is held as a whole.

    Why both: research/mathematics.md. ``aim``, ``gain`` and ``start`` were chosen by trial: notes/log.md. The
    held-out text chooses lambda, as it chooses the step in early stopping: neither may be judged on it.

    Attributes:
        start: S* at the start, a ratio of at least 1 %.
        aim: r above which the adapter may grow whatever x* is, a ratio in (0, 1).
        gain: change of ln o for a change of ln x* or ln r.
        limit: largest change of ln o at a measurement.
        ema_alpha: weight of the newest ln S in the filter, in (0, 1]; 1 does not smooth.
        lambda_min: lower bound of lambda, above 0.
        lambda_max: upper bound of lambda.
    """

    refuses: ClassVar[dict[str, str]] = {
        "--actuator decoupled": "it works with loss alone",
        "--measure factors": "it works with delta alone",
        "--adapter": "it asks what the whole adapter is worth at another size, and S measures only what is added to it",
        "--stream": "it looks ahead in the training text",
        "--held-out-share 0": "it acts by validations, and nothing is held out to validate on",
    }
    setpoint: ClassVar[float | None] = None

    start: float = 0.2
    aim: float = 0.55
    gain: float = 0.7
    limit: float = 1.5
    ema_alpha: float = 0.5
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        odds = self._first_odds if 0 < self.start < 1 else math.nan
        require(ODDS[0] <= odds <= ODDS[1], f"start {self.start}: is an S*, it must lie between 0.01 and 1")
        require(0 < self.aim < 1, f"aim {self.aim}: must lie between 0 and 1")
        check(self, "gain", "limit")

    def in_a_run_of(self, ticks: int, validations: int) -> "Cascade":
        """This law; refuses a run without the validations that it moves by; a tick finds the newest alone."""
        if (found := min(ticks - 1, validations)) < MIN_VALIDATIONS:
            raise ValueError(
                f"moves its setpoint at validations and takes {MIN_VALIDATIONS} at least, and the run has {found}; "
                "set a smaller --eval-steps or --control-every, or train for longer"
            )
        return self

    def sensor(self) -> Sensor:
        """Of what the adapter saves."""
        from research.laws.savings import Savings  # late: it takes seconds, and a law alone needs none

        return Savings()

    @property
    def lambda_start(self) -> float:
        return self._inner(self._first_odds).lambda_start

    @property
    def _first_odds(self) -> float:
        return self.start / (1 - self.start)

    def init(self) -> CascadeState:
        return CascadeState(self._inner(self._first_odds).init(), self._first_odds)

    def update(self, state: CascadeState, measurement: Measurement) -> tuple[CascadeState, Output]:
        if measurement.sensed:
            saved = AdapterBenefit(*(measurement.sensed[f"saved_{name}"] for name in AdapterBenefit._fields))
            if not all(map(math.isfinite, saved)):
                return state, replace(state.law.output, held=True, setpoint=self._inner(state.odds).setpoint)
            state = replace(state, odds=self._moved(state, saved))
        inner = self._inner(state.odds)
        law, output = inner.update(state.law, measurement)
        return replace(state, law=law), replace(output, setpoint=inner.setpoint)

    def _moved(self, state: CascadeState, saved: AdapterBenefit) -> float:
        """The setpoint's odds after a measurement. An adapter that is still zero saves nothing, which says nothing."""
        if state.law.position is None or not any(saved):
            return state.odds
        change = clip(self.gain * headroom(saved, self.aim), -self.limit, self.limit)
        odds = clip(state.odds * math.exp(change), *ODDS)
        reachable = math.exp(state.law.position + self.limit)
        return odds if change < 0 else max(state.odds, min(odds, reachable))

    def _inner(self, odds: float) -> PI:
        bounds = {"lambda_min": self.lambda_min, "lambda_max": self.lambda_max}
        return PI(setpoint=odds / (1 + odds), ema_alpha=self.ema_alpha, **bounds)
