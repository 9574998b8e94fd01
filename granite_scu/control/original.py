"""The law of the first Shannon Control Unit, an arm of the comparison."""

import cmath
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from granite_scu.control.base import (
    Measurement,
    Output,
    bounded_exp,
    clip,
    require,
    require_alpha,
    require_gain,
    require_setpoint,
    require_strengths,
)
from granite_scu.control.filter import Ema


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
    the plant lags (``stability_limit``), and only the leak of I keeps it stable below. The errors are absolute, so
    gains that serve one setpoint do not serve another, and its deadband is a fifth of its own setpoint. It is kept as
    it was published; only the bounds and the setpoint are a run's own.

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

    needs_kl: ClassVar[bool] = False

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
        require_setpoint(self.setpoint)
        require_gain("kp", self.kp)
        require_gain("ki", self.ki)
        require_alpha(self.ema_alpha)
        require(0 <= self.deadband < math.inf, f"deadband {self.deadband}: must be finite and not negative")
        require_gain("integral_limit", self.integral_limit)
        require(0 < self.leak <= 1, f"leak {self.leak}: must be in (0, 1]")
        require_strengths(self.lambda_min, self.lambda_max, lambda_init=self.lambda_init)

    @property
    def initial_strength(self) -> float:
        return self.lambda_init

    def init(self) -> OriginalState:
        return OriginalState(Ema(), 0.0, Output(self.lambda_init))

    def restore(self, mapping: Mapping[str, Any]) -> OriginalState:
        return OriginalState(Ema(**mapping["ema"]), mapping["integral"], Output.restore(mapping["output"]))

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
            reg_strength=state.output.reg_strength,
            smoothed=ema.mean if positive else None,
            error=math.log(ema.mean / self.setpoint) if positive else None,
        )

        # Proportional and integral.
        integral = self.leak * state.integral
        if abs(error) <= self.deadband:
            output = replace(seen, p_term=0.0, i_term=integral, saturated=state.output.saturated, in_deadband=True)
            return OriginalState(ema, integral, output), output
        strength = state.output.reg_strength
        outwards = (strength <= self.lambda_min and error < 0) or (strength >= self.lambda_max and error > 0)
        if not outwards:
            integral = clip(integral + self.ki * error, -self.integral_limit, self.integral_limit)
        p_term = self.kp * error

        # Bound.
        strength, saturated = bounded_exp(math.log(strength) + p_term + integral, self.lambda_min, self.lambda_max)
        output = replace(seen, reg_strength=strength, p_term=p_term, i_term=integral, saturated=saturated)
        return OriginalState(ema, integral, output), output


def stability_limit(law: Original, tau: float, theta: float = 0.0) -> float:
    """The |dS / d ln lambda| beyond which the loop about S* is unstable.

    That of the linear loop: small swings, but outside the deadband, in which lambda does not move at all; bounds and
    ``integral_limit`` are not met. With a plant of first order and dead time, S falling by g in all for a unit of
    ln lambda, sampled at the ticks as in ``identification.sampled``, the open loop is

        L(z) = g (b0 z + b1) / (z^(d+1) (z - a)) . alpha z / (z - 1 + alpha) . z / (z - 1) . (Kp + Ki z / (z - leak))

    It is stable for a small g, and up to the first at which L(e^iw) = -1 for some w.

    At the published gains, for plants that answer within the tick, with the lag and dead time that ``identify`` found
    on the embedded model at S* = 2 % (in ticks of four steps), and with ten ticks of lag:

    >>> [round(stability_limit(Original(), tau, theta), 4) for tau, theta in ((0.01, 0.0), (3.5, 0.55), (10.0, 0.55))]
    [0.0095, 0.0046, 0.0025]

    Args:
        law: of which the gains, the filter and the leak count.
        tau: time constant of the plant, in ticks.
        theta: its dead time, in ticks.

    Raises:
        ValueError: without a leak there are two integrators, and no gain that is small enough.
    """
    require(law.leak < 1, f"leak {law.leak}: must be below 1 for the loop to have a limit")
    whole = math.floor(theta)
    a, late = math.exp(-1 / tau), math.exp(-(1 - (theta - whole)) / tau)

    def opened(w: float) -> complex:
        """L(e^iw) at g = 1."""
        z = cmath.exp(1j * w)
        plant = ((1 - late) * z + (late - a)) / (z ** (whole + 1) * (z - a))
        smoothing = law.ema_alpha * z / (z - 1 + law.ema_alpha)
        return plant * smoothing * z / (z - 1) * (law.kp + law.ki * z / (z - law.leak))

    ratio = (math.pi / _LOWEST) ** (1 / _FREQUENCIES)
    # The highest frequency itself, where L is real.
    limits = [1 / abs(opened(math.pi))] if opened(math.pi).real < 0 else []
    for i in range(_FREQUENCIES):
        low, high = _LOWEST * ratio**i, _LOWEST * ratio ** (i + 1)
        # Where the real axis is crossed left of 0, by halves to the last digit.
        side = opened(low).imag > 0
        if opened(low).real < 0 and side != (opened(high).imag > 0):
            for _ in range(50):
                middle = (low + high) / 2
                low, high = (middle, high) if (opened(middle).imag > 0) == side else (low, middle)
            limits.append(1 / abs(opened(low)))
    return min(limits)


_LOWEST, _FREQUENCIES = 1e-5, 1000
"""Radians per tick, and steps from there to pi."""
