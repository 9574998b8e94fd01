"""Two loops: PI holds S at a setpoint, and held-out text moves the setpoint within the run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from granite_scu.control.base import (
    Measurement,
    Output,
    clip,
    require,
    require_alpha,
    require_gain,
    require_strengths,
)
from granite_scu.control.pi import PI, PIState

PROBED_SCALE = 0.8
"""The adapter is scored on held-out text at its own scale and at this share of it: far enough for a difference beyond
rounding, near enough for the slope at 1."""

ODDS = (1e-6, 1e6)
"""Bounds of S*/(1 - S*), which keep S* off 0 and 1."""


def parabola(saved: float, saved_when_scaled: float) -> tuple[float, float]:
    """(a, c) of V(x) = a x - c x^2 through V(0) = 0, V(PROBED_SCALE) and V(1): the bits per token saved on held-out
    text by the update at x times its size.

    Args:
        saved: V(1).
        saved_when_scaled: V(PROBED_SCALE).
    """
    x = PROBED_SCALE
    slope = (saved_when_scaled - x * x * saved) / (x - x * x)
    return slope, slope - saved


@dataclass(frozen=True)
class CascadeState:
    """What one tick leaves to the next.

    Attributes:
        law: state of the inner loop.
        odds: S*/(1 - S*) in force.
        pulls: sum of the training text's pulls since the last validation, one a tick.
        ticks: their number.
    """

    law: PIState
    odds: float
    pulls: float = 0.0
    ticks: int = 0


@dataclass(frozen=True)
class Cascade:
    """Holds the adapter at the size at which held-out text would gain nothing from a larger or smaller one.

    A constant lambda has to be found by a sweep because nothing in training says when the adapter memorises. Held-out
    text does: where a smaller adapter would save more bits on it, lambda is too weak, and where a larger one would, it
    is too strong. A scaled adapter costs a forward pass, not a run.

    The inner loop is ``PI``. The outer one acts at the first tick after a validation, on the setpoint's odds
    o = S*/(1 - S*), which start at those of ``start``. Three forces act on the adapter's size x, each a derivative by
    ln x in bits per token: training text pulls with T, lambda pulls back with 2 lambda ParamBPT, and held-out text
    would pull with H. What of T is not in H is memorising, and what lambda is for:

        o <- o exp(clip(rate (min(2 lambda ParamBPT, T) - (T - H)) / a, +- limit)),       - limit where a <= 0

    where H = a - 2c and a are those of the ``parabola`` of the bits saved on held-out text, the training pull is
    averaged since the last validation, and lambda counts for no more than T: at rest it pulls that much, and on the way
    to a new setpoint it overshoots. The odds are not raised above exp(limit) times those of S, which may be unable to
    follow.

    So lambda comes to balance what is memorised, and the adapter grows as if it were trained on text that it has not
    seen. Noise in the weights, which a large learning rate leaves, is in T and in H and cancels. With data enough that
    nothing is memorised, S* runs ahead of S, and lambda goes to its lower bound.

    The held-out text chooses lambda, as it chooses the step in early stopping: neither may be judged on it.

    Attributes:
        start: S* at the start, a ratio in (0, 1).
        rate: change of ln o at a measurement, per share of a that lambda pulls too much.
        limit: largest change of ln o at a measurement.
        ema_alpha: weight of the newest ln S in the filter, in (0, 1]; 1 does not smooth.
        lambda_min: lower bound of lambda, above 0.
        lambda_max: upper bound of lambda.
    """

    needs_kl: ClassVar[bool] = False
    setpoint: ClassVar[float | None] = None

    start: float = 0.1
    rate: float = 2.0
    limit: float = 1.5
    ema_alpha: float = 0.5
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        require(ODDS[0] < self.start < 1 - ODDS[0], f"start {self.start}: is an S*, it must lie between 0 and 1")
        require_gain("rate", self.rate)
        require_gain("limit", self.limit)
        require_alpha(self.ema_alpha)
        require_strengths(self.lambda_min, self.lambda_max, lambda_min=self.lambda_min)

    @property
    def initial_strength(self) -> float:
        return self._inner(self._first_odds).initial_strength

    @property
    def _first_odds(self) -> float:
        return self.start / (1 - self.start)

    def init(self) -> CascadeState:
        return CascadeState(self._inner(self._first_odds).init(), self._first_odds)

    def restore(self, mapping: Mapping[str, Any]) -> CascadeState:
        return CascadeState(**{**mapping, "law": self._inner(self._first_odds).restore(mapping["law"])})

    def update(self, state: CascadeState, measurement: Measurement) -> tuple[CascadeState, Output]:
        if math.isfinite(measurement.pull):
            state = replace(state, pulls=state.pulls + measurement.pull, ticks=state.ticks + 1)
        if measurement.saved is not None and all(map(math.isfinite, measurement.saved)) and state.ticks:
            odds = self._moved(state, measurement.saved, measurement.param_bpt)
            state = replace(state, odds=odds, pulls=0.0, ticks=0)
        inner = self._inner(state.odds)
        law, output = inner.update(state.law, measurement)
        return replace(state, law=law), replace(output, setpoint=inner.setpoint)

    def _moved(self, state: CascadeState, saved: tuple[float, float], param_bpt: float) -> float:
        """The setpoint's odds after a measurement."""
        a, c = parabola(*saved)
        training = state.pulls / state.ticks
        against = clip(2 * state.law.output.reg_strength * param_bpt, 0.0, max(training, 0.0))
        surplus = against - (training - (a - 2 * c))
        if not math.isfinite(surplus):
            return state.odds
        change = clip(self.rate * surplus / a, -self.limit, self.limit) if a > 0 else -self.limit
        odds = clip(state.odds * math.exp(change), *ODDS)
        reachable = math.exp((state.law.position or 0.0) + self.limit)
        return odds if change < 0 else max(state.odds, min(odds, reachable))

    def _inner(self, odds: float) -> PI:
        bounds = {"lambda_min": self.lambda_min, "lambda_max": self.lambda_max}
        return PI(setpoint=odds / (1 + odds), ema_alpha=self.ema_alpha, **bounds)
