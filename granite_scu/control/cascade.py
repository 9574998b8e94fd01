"""Two loops: PI holds S at a setpoint, and held-out text moves the setpoint within the run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from granite_scu.control.base import (
    Measurement,
    Output,
    Saved,
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


def best_log_scale(saved: float, saved_when_scaled: float) -> float:
    """ln of the factor that would make the adapter best on held-out text; infinite where no finite one would.

    By the parabola V(x) = a x - c x^2 through V(0) = 0, V(PROBED_SCALE) and V(1): it is best at a / 2c.

    Args:
        saved: V(1), bits per token that the adapter saves on held-out text.
        saved_when_scaled: V(PROBED_SCALE), with the update scaled down to that share.
    """
    x = PROBED_SCALE
    slope = (saved_when_scaled - x * x * saved) / (x - x * x)
    bend = slope - saved
    if slope <= 0:
        return -math.inf
    return math.log(slope / (2 * bend)) if bend > 0 else math.inf


def log_carried_share(saved: Saved) -> float | None:
    """ln of the best scale on held-out text over that on training text; None where neither has a finite one."""
    held_out = best_log_scale(saved.held_out, saved.held_out_scaled)
    training = best_log_scale(saved.training, saved.training_scaled)
    return None if held_out == training else held_out - training


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
    """Holds the adapter at the size at which scaling it would not make it better on held-out text.

    A constant lambda has to be found by a sweep because nothing in training says when the adapter memorises. Held-out
    text does: where a smaller adapter would save more bits on it, lambda is too weak, and where a larger one would, it
    is too strong. A scaled adapter costs a forward pass, not a run.

    The inner loop is ``PI``. The outer one acts at the first tick after a validation, on the setpoint's odds
    o = S*/(1 - S*), which start at those of ``start``. With x* the best scale (``best_log_scale``):

        o <- o exp(clip(2 rate ln x*, +- limit))

    since ParamBPT is the square of the scale; but o is not raised above exp(limit) times the odds that S has, which it
    may be unable to follow. With data enough that nothing is memorised, x* stays above 1, S* runs ahead of S, and
    lambda goes to its lower bound.

    The held-out text chooses lambda, as it chooses the step in early stopping: neither may be judged on it.

    Attributes:
        start: S* at the start, a ratio in (0, 1).
        rate: share of the way to the best scale that the setpoint goes at a measurement.
        limit: largest change of ln o at a measurement.
        ema_alpha: weight of the newest ln S in the filter, in (0, 1]; 1 does not smooth.
        lambda_min: lower bound of lambda, above 0.
        lambda_max: upper bound of lambda.
    """

    needs_kl: ClassVar[bool] = False
    setpoint: ClassVar[float | None] = None

    start: float = 0.1
    aim: float = 0.65
    gain: float = 1.0
    limit: float = 1.5
    ema_alpha: float = 0.5
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        require(ODDS[0] < self.start < 1 - ODDS[0], f"start {self.start}: is an S*, it must lie between 0 and 1")
        require(0 < self.aim < 1, f"aim {self.aim}: must lie between 0 and 1")
        require_gain("gain", self.gain)
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
        if measurement.saved is not None and all(map(math.isfinite, measurement.saved)):
            state = replace(state, odds=self._moved(state, measurement.saved))
        inner = self._inner(state.odds)
        law, output = inner.update(state.law, measurement)
        return replace(state, law=law), replace(output, setpoint=inner.setpoint)

    def _moved(self, state: CascadeState, saved: Saved) -> float:
        """The setpoint's odds after a measurement."""
        log_share = log_carried_share(saved)
        if log_share is None:
            return state.odds
        change = clip(self.gain * (log_share - math.log(self.aim)), -self.limit, self.limit)
        odds = clip(state.odds * math.exp(change), *ODDS)
        reachable = math.exp((state.law.position or 0.0) + self.limit)
        return odds if change < 0 else max(state.odds, min(odds, reachable))

    def _inner(self, odds: float) -> PI:
        bounds = {"lambda_min": self.lambda_min, "lambda_max": self.lambda_max}
        return PI(setpoint=odds / (1 + odds), ema_alpha=self.ema_alpha, **bounds)
