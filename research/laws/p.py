"""Proportional control of ln S through ln lambda."""

import math
from dataclasses import dataclass

from granite_scu.control.laws.base import Output, bounded_exp, check
from granite_scu.control.laws.feedback import Feedback


@dataclass(frozen=True)
class Proportional(Feedback):
    """With y = EMA(ln S):

        x_k = clip(ln lambda_init + Kp (y_k - ln S*), ln lambda_min, ln lambda_max),    lambda_k = exp(x_k)

    It has no memory but the filter, so nothing winds up. Where lambda_init is not the lambda that holds S* it rests
    off the setpoint, by the less the larger Kp is: the steady-state error that the integral term is there to remove.

    Attributes, besides those of ``Feedback``, whose ``lambda_init`` is lambda at S = S* too:
        kp: change of ln lambda per unit of error.
    """

    kp: float = 2.0

    def __post_init__(self) -> None:
        check(self, "kp")

    def act(self, error: float, lam: float) -> Output:
        p_term = self.kp * error
        wanted = math.log(self.lambda_init) + p_term
        lam, saturated = bounded_exp(wanted, self.lambda_min, self.lambda_max)
        return Output(lam, p_term=p_term, saturated=saturated)
