"""Two loops: PI holds S at a setpoint, and validation moves the setpoint within the same run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from granite_scu.control.base import Measurement, Output, clip, require, require_alpha, require_strengths
from granite_scu.control.pi import PI, PIState


@dataclass(frozen=True)
class CascadeState:
    """What one tick leaves to the next.

    Attributes:
        law: state of the inner loop.
        odds: S*/(1 - S*) in force; None while S is free.
        best: lowest validation so far, in bits per token; None before the first.
        best_odds: S/(1 - S) at that time.
        previous: the validation before, in bits per token.
    """

    law: PIState
    odds: float | None = None
    best: float | None = None
    best_odds: float | None = None
    previous: float | None = None


@dataclass(frozen=True)
class Cascade:
    """Lets S grow while that helps on held-out text, and then holds it where it helped.

    The inner loop is ``PI``. The outer one acts at the first tick after a validation v_j, on the setpoint's odds
    o = S*/(1 - S*); with the odds of S itself at that validation, o_S:

        free, until v_j > (1 + tolerance) min(v_1 ... v_j-1): lambda rests on its lower bound
        turned:                   o <- o_S of the best validation so far
        then, v_j rose:           o <- min(down o, o_S of the best)     unless S is still far above o, on its way down
        then, v_j is the best:    o <- up min(o, o_S)                  not above what S can follow
        then, neither:            o stays

    where "rose" means above v_j-1, and "best" below all before, by more than ``tolerance``. A validation that falls and
    is not the best recovers from what was memorised, and says nothing for a larger adapter.

    So it needs no setpoint: with data enough that nothing overfits, lambda does nothing; with little data the growth of
    the adapter is stopped where early stopping would end the run, and what is learned goes on changing at that size.
    Early stopping and this look at the same validations; neither may be judged on them.

    Attributes:
        ema_alpha: weight of the newest ln S in the filter, in (0, 1]; 1 does not smooth.
        tolerance: relative changes of validation up to this are noise.
        down: what a rise of validation leaves of the setpoint's odds, in (0, 1).
        up: factor of the odds when validation is best, above 1.
        lambda_min: lower bound of lambda, above 0.
        lambda_max: upper bound of lambda.
    """

    needs_kl: ClassVar[bool] = False
    setpoint: ClassVar[float | None] = None

    ema_alpha: float = 0.5
    tolerance: float = 1e-3
    down: float = 0.6
    up: float = 1.3
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        require_alpha(self.ema_alpha)
        require_strengths(self.lambda_min, self.lambda_max, lambda_min=self.lambda_min)
        require(0 <= self.tolerance < math.inf, f"tolerance {self.tolerance}: must be finite and not negative")
        require(0 < self.down < 1, f"down {self.down}: must be in (0, 1)")
        require(1 < self.up < math.inf, f"up {self.up}: must be finite and above 1")

    @property
    def initial_strength(self) -> float:
        return self.lambda_min

    def init(self) -> CascadeState:
        return CascadeState(self._inner(0.5).init())

    def restore(self, mapping: Mapping[str, Any]) -> CascadeState:
        return CascadeState(**{**mapping, "law": self._inner(0.5).restore(mapping["law"])})

    def update(self, state: CascadeState, measurement: Measurement) -> tuple[CascadeState, Output]:
        validation = measurement.validation_bpt
        if validation is not None and 0 < validation < math.inf and state.law.position is not None:
            state = self._heed(state, validation, math.exp(state.law.position))
        return self._hold(state, measurement) if state.odds else self._free(state, measurement)

    def _heed(self, state: CascadeState, validation: float, odds: float) -> CascadeState:
        """The outer loop: the setpoint after a validation of the adapter that had these odds."""
        best, previous, target = state.best, state.previous, state.odds
        if best is None or previous is None or validation < best:
            state = replace(state, best=validation, best_odds=odds)
        is_best = best is not None and validation < best * (1 - self.tolerance)
        rose = previous is not None and validation > previous * (1 + self.tolerance)
        best_odds = odds if state.best_odds is None else state.best_odds
        if target is None and best is not None and validation > best * (1 + self.tolerance):
            target = best_odds
        elif target is not None and rose and odds < target / self.down:
            target = min(self.down * target, best_odds)
        elif target is not None and is_best:
            target = self.up * min(target, odds)
        return replace(state, odds=target, previous=validation)

    def _hold(self, state: CascadeState, measurement: Measurement) -> tuple[CascadeState, Output]:
        assert state.odds is not None
        setpoint = _ratio(state.odds)
        law, output = self._inner(setpoint).update(state.law, measurement)
        return replace(state, law=law), replace(output, setpoint=setpoint)

    def _free(self, state: CascadeState, measurement: Measurement) -> tuple[CascadeState, Output]:
        """The inner loop only looks on, its setpoint at S itself, so that it starts without an integral."""
        s = measurement.s if 0 < measurement.s < 1 else 0.5
        law, output = self._inner(s).update(state.law, measurement)
        law = replace(law, integral=0.0, bias=0.0)
        free = Output(self.lambda_min, smoothed=output.smoothed, held=output.held)
        return replace(state, law=law), free

    def _inner(self, setpoint: float) -> PI:
        bounds = {"lambda_min": self.lambda_min, "lambda_max": self.lambda_max}
        return PI(setpoint=setpoint, ema_alpha=self.ema_alpha, **bounds)


def _ratio(odds: float) -> float:
    """S of these odds; kept off 0 and 1, which no setpoint may be."""
    return clip(odds / (1 + odds), 1e-6, 1 - 1e-6)
