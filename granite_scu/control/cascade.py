"""Two loops: PI holds S at a setpoint, and what training brings on held-out text moves the setpoint within the run."""

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

ODDS = (1e-6, 1e6)
"""Bounds of S*/(1 - S*), which keep S* off 0 and 1."""


@dataclass(frozen=True)
class CascadeState:
    """What one tick leaves to the next.

    Attributes:
        law: state of the inner loop.
        odds: S*/(1 - S*) in force.
        reference: the carry-over of a small adapter; None before it is measured.
        heard: usable measurements of the savings so far.
    """

    law: PIState
    odds: float
    reference: float | None = None
    heard: int = 0


@dataclass(frozen=True)
class Cascade:
    """Holds the carry-over at ``share`` of what it was while the adapter was small.

    An adapter that saves T bits per token on the text it trained on saves V on held-out text; V / T is the carry-over.
    To second order V = a T - c T^2: what is learned first carries over by a share a, and memorising eats into it.
    V is largest where V / T = a / 2, whatever a and c are, and so whatever the corpus, its size and the learning rate.
    That is why ``share`` is a half, and the one setpoint that needs no choosing. The same model says how far it is to
    there: with r = V / (a T), the best T is T (1 - share) / (1 - r).

    The inner loop is ``PI``. The outer one acts at the first tick after a validation, on the setpoint's odds
    o = S*/(1 - S*), which start at those of ``start``:

        first ``calibration`` measurements:   o stays, and the last of them gives a = V / T
        then:                                 o <- o exp(clip(rate ln((1 - share) / (1 - r)), +- limit))

    with ``limit`` for r of 1 or more, and o not raised above exp(limit) times the odds that S has, which it may be
    unable to follow. (T grows about as the cube root of the odds, so a ``rate`` of 3 would be Newton's step; less is
    damped.) So S starts small and grows as long as it pays. With data enough that nothing is memorised, V / T stays
    near a, S* runs ahead of S, and lambda goes to its lower bound.

    The held-out text chooses lambda, as it chooses the step in early stopping: neither may be judged on it.

    Attributes:
        share: setpoint of the carry-over relative to a, in (0, 1).
        start: S* at the start, a ratio in (0, 1), small.
        calibration: measurements of the savings up to the one that gives a, at least 1.
        rate: of the outer loop: change of ln o at a measurement, per change of ln T that the model asks for.
        limit: largest change of ln o at a measurement.
        ema_alpha: weight of the newest ln S in the filter, in (0, 1]; 1 does not smooth.
        lambda_min: lower bound of lambda, above 0.
        lambda_max: upper bound of lambda.
    """

    needs_kl: ClassVar[bool] = False
    setpoint: ClassVar[float | None] = None

    share: float = 0.5
    start: float = 0.02
    calibration: int = 2
    rate: float = 1.0
    limit: float = 1.5
    ema_alpha: float = 0.5
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        require(0 < self.share < 1, f"share {self.share}: must lie between 0 and 1")
        require(ODDS[0] < self.start < 1 - ODDS[0], f"start {self.start}: is an S*, it must lie between 0 and 1")
        require(self.calibration >= 1, f"calibration {self.calibration}: must be at least 1")
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
        if measurement.saved is not None:
            state = self._heed(state, *measurement.saved)
        inner = self._inner(state.odds)
        law, output = inner.update(state.law, measurement)
        return replace(state, law=law), replace(output, setpoint=inner.setpoint)

    def _heed(self, state: CascadeState, training: float, held_out: float) -> CascadeState:
        """The outer loop: the setpoint after a measurement of the savings."""
        if not (0 < training < math.inf and math.isfinite(held_out)):
            return state
        carry_over, heard = held_out / training, state.heard + 1
        if state.reference is None:
            known = heard >= self.calibration and carry_over > 0
            return replace(state, heard=heard, reference=carry_over if known else None)
        memorised = 1 - carry_over / state.reference
        missing = math.log((1 - self.share) / memorised) if memorised > 0 else math.inf
        change = clip(self.rate * missing, -self.limit, self.limit)
        reachable = math.exp((state.law.position or 0.0) + self.limit)
        odds = clip(state.odds * math.exp(change), *ODDS)
        return replace(state, heard=heard, odds=odds if change < 0 else max(state.odds, min(odds, reachable)))

    def _inner(self, odds: float) -> PI:
        # Kept off 0 and 1, which no setpoint may be.
        setpoint = clip(odds / (1 + odds), 1e-6, 1 - 1e-6)
        return PI(setpoint=setpoint, ema_alpha=self.ema_alpha, lambda_min=self.lambda_min, lambda_max=self.lambda_max)
