"""From a model of the plant to gains of the law."""

import math
from dataclasses import dataclass, replace

from granite_scu.control.laws.base import require
from research.identification.fopdt import Fopdt


@dataclass(frozen=True)
class Gains:
    """What SIMC proposes.

    Attributes:
        kp: change of ln lambda per unit of ln(S / S*); positive, the plant's negative gain is in the sign of the error.
        tau_i: integral time, in ticks.
        tau_c: closed-loop time constant that they were made for, in ticks.
    """

    kp: float
    tau_i: float
    tau_c: float

    @property
    def ki(self) -> float:
        """Integral gain per tick: kp / tau_i."""
        return self.kp / self.tau_i


def simc(model: Fopdt, tau_c: float | None = None) -> Gains:
    """Gains by the SIMC rules of Skogestad, "Simple analytic rules for model reduction and PID controller tuning"
    (J. Process Control 13, 2003), equations 23 and 24:

        Kc = (1 / |K|) tau / (tau_c + theta)        tau_I = min(tau, 4 (tau_c + theta))        Ki = Kc / tau_I

    tau_c is the one thing to choose. The paper recommends tau_c = theta: a gain margin near 3 and a delay margin near
    2 theta. Half a tick is the least taken by default, since nothing in a sampled loop is faster than that.

    >>> gains = simc(Fopdt(gain=-1.0, tau=8.0, theta=1.0))
    >>> gains.kp, gains.tau_i, gains.ki
    (4.0, 8.0, 0.5)

    Raises:
        ValueError: the gain is 0, or tau_c + theta is.
    """
    require(model.gain != 0, "gain 0: the input does nothing, so no gains can be found")
    closed = max(model.theta, 0.5) if tau_c is None else tau_c
    lag = closed + model.theta
    require(0 < lag < math.inf, f"tau_c {closed}: tau_c + theta must be positive and finite")
    return Gains(model.tau / (abs(model.gain) * lag), min(model.tau, 4 * lag), closed)


def effective(model: Fopdt) -> Fopdt:
    """The model as the law sees it: half a tick of dead time more for the hold."""
    return replace(model, theta=model.theta + 0.5)
