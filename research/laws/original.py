"""The law of the first Shannon Control Unit, an arm of the comparison."""

import math
from dataclasses import dataclass, replace

from granite_scu.control.laws.base import Measurement, Output, bounded_exp, check, clip, require
from granite_scu.control.laws.filter import Ema


@dataclass(frozen=True)
class OriginalState:
    """What one tick leaves to the next.

    Attributes:
        ema: filter of S, not of its logarithm.
        integral: I.
        output: the last output that was not held; a tick without a valid measurement repeats it.
    """

    ema: Ema
    integral: float
    output: Output


@dataclass(frozen=True)
class Original:
    """Each tick, with m = EMA(S) that starts at the first S:

        e = m - S*                                      absolute, in S
        |e| <= deadband:  I <- leak I,  lambda stays
        otherwise:        I <- clip(leak I + Ki e, +- i_limit),  lambda <- clip(lambda exp(Kp e + I), bounds)

    and Ki e is left out while lambda rests on the bound that e points beyond.

    What it sets is the change of ln lambda, so Kp is an integrator and Ki a second one on top of it, and the filter
    lags by nine ticks more: at its own gains the loop is unstable once |dS / d ln lambda| exceeds 0.0095, less where
    the plant lags (``stability_limit`` in its tests), and only the leak of I keeps it stable below. The errors are
    absolute, so gains that serve one setpoint do not serve another, and its deadband is a fifth of its own setpoint. It
    is kept as it was published; only the bounds and the setpoint are a run's own.

    Source: ``update_lambda`` in shannon_control/control.py of github.com/Shannon-Labs/shannon-control-unit. There
    lambda was a number beside the loss and reached no gradient; here it acts like any other law's.

    Attributes:
        setpoint: S*, a ratio in (0, 1).
        kp: change of ln lambda per unit of S - S* and tick.
        ki: change of the integral per unit of S - S* and tick.
        ema_alpha: weight of the newest S in the filter, in (0, 1]; 1 does not smooth.
        deadband: errors |S - S*| up to this leave lambda alone.
        integral_limit: i_limit, the largest |I|, in ln lambda per tick.
        leak: what a tick leaves of the integral, in (0, 1].
        lambda_init: lambda before the first valid tick.
        lambda_min: lower bound of lambda, above 0.
        lambda_max: upper bound of lambda.
    """

    setpoint: float = 0.01
    kp: float = 0.8
    ki: float = 0.15
    ema_alpha: float = 0.1
    deadband: float = 0.002
    integral_limit: float = 0.2
    leak: float = 0.995
    lambda_init: float = 1.0
    lambda_min: float = 1e-4
    lambda_max: float = 2.0

    def __post_init__(self) -> None:
        check(self, "kp", "ki", "integral_limit")
        require(0 < self.leak <= 1, f"leak {self.leak}: must be in (0, 1]")

    @property
    def lambda_start(self) -> float:
        return self.lambda_init

    def init(self) -> OriginalState:
        return OriginalState(Ema(), 0.0, Output(self.lambda_init))

    def update(self, state: OriginalState, measurement: Measurement) -> tuple[OriginalState, Output]:
        # Measure. S = 0 is a measurement to a law that takes no logarithm.
        s = measurement.s
        if not 0 <= s < math.inf:
            return state, replace(state.output, held=True)
        # A full weight from the start is the plain average, not the bias-corrected one.
        ema = Ema(s, weight=1.0) if state.ema.value is None else state.ema.update(s, self.ema_alpha)
        error = ema.mean - self.setpoint
        positive = ema.mean > 0
        seen = Output(
            lam=state.output.lam,
            smoothed=ema.mean if positive else None,
            error=math.log(ema.mean / self.setpoint) if positive else None,
        )

        # Proportional and integral.
        integral = self.leak * state.integral
        if abs(error) <= self.deadband:
            output = replace(seen, p_term=0.0, i_term=integral, saturated=state.output.saturated, in_deadband=True)
            return OriginalState(ema, integral, output), output
        lam = state.output.lam
        outwards = (lam <= self.lambda_min and error < 0) or (lam >= self.lambda_max and error > 0)
        if not outwards:
            integral = clip(integral + self.ki * error, -self.integral_limit, self.integral_limit)
        p_term = self.kp * error

        # Bound.
        lam, saturated = bounded_exp(math.log(lam) + p_term + integral, self.lambda_min, self.lambda_max)
        output = replace(seen, lam=lam, p_term=p_term, i_term=integral, saturated=saturated)
        return OriginalState(ema, integral, output), output
