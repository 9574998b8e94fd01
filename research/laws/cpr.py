"""Constrained parameter regularisation: each adapted matrix has a bound, and a lambda that enforces it."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from granite_scu.control.laws.base import Measurement, Output, check, clip, require
from granite_scu.control.laws.filter import Ema, read

MIN_SHARE = 0.01
"""A matrix that costs less than this share of the mean over the matrices has learned nothing yet, and gets no bound."""


@dataclass(frozen=True)
class CPRState:
    """What one tick leaves to the next.

    Attributes:
        ema: filter of ln S, for the log.
        ticks: valid ticks so far.
        lams: lambda of each matrix; empty before the first valid tick.
        bounds: the most bits per token of each matrix; 0 for one that has none yet.
        output: the last output that was not held; a tick without a valid measurement repeats it.
    """

    ema: Ema
    ticks: int
    lams: tuple[float, ...]
    bounds: tuple[float, ...]
    output: Output


@dataclass(frozen=True)
class CPR:
    """Each tick, for each adapted matrix i that costs P_i bits per token:

        lambda_i <- clip(lambda_i + mu (P_i / bound_i - 1), 0, lambda_max)

    the multiplier step of an augmented Lagrangian for P_i <= bound_i. It rests at 0 while the bound is kept. The bound
    is given, one for all, or each P_i at tick ``cpr_warmup`` (the paper's Kappa-WS); before that nothing acts. A matrix
    that has learned nothing by then is bound by the first P_i that is at least a hundredth of the mean over the
    matrices: a smaller one would be exceeded a thousandfold as soon as it learns.

    Source: Franke et al., "Improving Deep Learning Optimization through Constrained Parameter Regularization"
    (arXiv 2311.09058), algorithm 1. Departures: the constraint is on the update of a matrix, in bits per token, and
    not on the weights, which are never near zero; the violation is relative to the bound, so that one mu serves
    matrices of any size; the multipliers move once a tick and not once a step; lambda has an upper bound; and lambda
    acts in the loss, where the paper's acts after the step, apart from Adam.

    It does not track S, so it has no setpoint; ln S is smoothed for the log.

    Attributes:
        cpr_bound: the most bits per token that a matrix may take; None takes what each has after the warm-up.
        cpr_warmup: valid ticks before that one, at least 1.
        mu: change of lambda per unit of relative violation and tick.
        ema_alpha: weight of the newest ln S in the filter of the log, in (0, 1]; P_i is not smoothed.
        lambda_max: upper bound of each lambda.
    """

    refuses: ClassVar[dict[str, str]] = {"--actuator decoupled": "its lambda grows in steps that are made for the loss"}
    setpoint: ClassVar[None] = None

    cpr_bound: float | None = None
    cpr_warmup: int = 10
    mu: float = 0.1
    ema_alpha: float = 0.5
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        check(self, "mu", "lambda_max", *(() if self.cpr_bound is None else ("cpr_bound",)))
        require(self.cpr_warmup >= 1, f"cpr_warmup {self.cpr_warmup}: must be at least 1 tick")

    def in_a_run_of(self, ticks: int, validations: int) -> "CPR":
        """This law; refuses a run in which it would do nothing."""
        # At the tick that takes the bounds no matrix exceeds them yet, and after the last no step is left to act on.
        if self.cpr_bound is None and self.cpr_warmup > ticks - 2:
            most = f", set cpr_warmup to at most {ticks - 2}" if ticks > 2 else ""
            raise ValueError(
                f"takes its bounds after {self.cpr_warmup} ticks and would do nothing in {ticks}; give cpr_bound{most}"
                ", a smaller --control-every, or train for longer"
            )
        return self

    @property
    def lambda_start(self) -> float:
        return 0.0

    def init(self) -> CPRState:
        return CPRState(Ema(), 0, (), (), Output(0.0))

    def update(self, state: CPRState, measurement: Measurement) -> tuple[CPRState, Output]:
        reading = read(state.ema, measurement, self.ema_alpha)
        costs = measurement.layers
        if not (reading.valid and costs and all(0 <= cost < math.inf for cost in costs)):
            return state, replace(state.output, held=True)
        ticks = state.ticks + 1
        bounds = self._bounds(state.bounds or (0.0,) * len(costs), costs, ticks)
        before = state.lams or (0.0,) * len(costs)
        lams = tuple(self._multiplier(lam, cost, bound) for lam, cost, bound in zip(before, costs, bounds, strict=True))
        output = Output(
            lam=math.fsum(lams) / len(lams),
            smoothed=reading.smoothed,
            saturated=max(lams) >= self.lambda_max,
            layers=lams,
        )
        return CPRState(reading.ema, ticks, lams, bounds, output), output

    def _bounds(self, bounds: tuple[float, ...], costs: tuple[float, ...], ticks: int) -> tuple[float, ...]:
        if self.cpr_bound is not None:
            return (self.cpr_bound,) * len(costs)
        if ticks < self.cpr_warmup:
            return bounds
        least = MIN_SHARE * sum(cost / len(costs) for cost in costs)
        return tuple(bound or (cost if cost >= least else 0.0) for bound, cost in zip(bounds, costs, strict=True))

    def _multiplier(self, lam: float, cost: float, bound: float) -> float:
        if not bound:
            return lam
        return clip(lam + self.mu * (cost / bound - 1), 0.0, self.lambda_max)
