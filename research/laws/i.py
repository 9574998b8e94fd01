"""Integral control of ln S through ln lambda."""

import math
from dataclasses import dataclass

from granite_scu.control.laws.base import Output, bounded_exp, check, clip
from granite_scu.control.laws.feedback import Feedback


@dataclass(frozen=True)
class Integral(Feedback):
    """With y = EMA(ln S):

        e_k = clip(y_k - ln S*, +- e_max)
        x_k = clip(x_{k-1} + Ki e_k, ln lambda_min, ln lambda_max),    lambda_k = exp(x_k),    x_0 = ln lambda_init

    The sum is kept as lambda itself, which is bounded, so it cannot wind up. S starts at 0 and rises for long; with
    the error clipped, that rise takes no more of lambda than Ki e_max a tick.

    On a plant that is first order in ln S, of gain -K and time constant T ticks, the loop's damping is
    1 / (2 sqrt(Ki K T)); the default gives 0.7 at K T = 5.

    Attributes, besides those of ``Feedback``:
        ki: change of ln lambda per unit of error and tick.
        deadband: errors |ln(S / S*)| below this are not integrated.
        error_limit: e_max, the largest error that is acted upon, in ln S.
    """

    ki: float = 0.1
    deadband: float = 0.0
    error_limit: float = 0.75

    def __post_init__(self) -> None:
        check(self, "ki", "error_limit")

    def act(self, error: float, lam: float) -> Output:
        in_deadband = abs(error) < self.deadband
        change = 0.0 if in_deadband else self.ki * clip(error, -self.error_limit, self.error_limit)
        wanted = math.log(lam) + change
        lam, saturated = bounded_exp(wanted, self.lambda_min, self.lambda_max)
        return Output(lam, i_term=math.log(lam), saturated=saturated, in_deadband=in_deadband)
