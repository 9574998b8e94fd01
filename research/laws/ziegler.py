"""The controller of reinforcement learning from human feedback: a clipped relative error multiplies lambda."""

import math
from dataclasses import dataclass

from granite_scu.control.laws.base import Output, bounded_exp, check, clip
from granite_scu.control.laws.feedback import Feedback


@dataclass(frozen=True)
class Ziegler(Feedback):
    """Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2:

        e_k      = clip((F_k - F*) / F*, -0.2, 0.2)
        beta_k+1 = beta_k (1 + K e_k),    K = 0.1

    F is the divergence that is held, F* what it is held at. Here F / F* is S / (1 - S) over what that is at S*: of
    drift the measurement has S = F / (F + H), so that this is drift over its budget. A tick takes the place of a batch.
    It holds nothing but lambda, which is bounded.

    Attributes, besides those of ``Feedback``, of which it smooths nothing:
        gain: K.
        error_limit: the largest error that is acted upon.
    """

    ema_alpha: float = 1.0
    gain: float = 0.1
    error_limit: float = 0.2

    def __post_init__(self) -> None:
        check(self, "gain", "error_limit")

    def act(self, error: float, lam: float) -> Output:
        s = self.setpoint * math.exp(error)
        relative = s / (1 - s) * (1 - self.setpoint) / self.setpoint - 1 if s < 1 else math.inf
        change = self.gain * clip(relative, -self.error_limit, self.error_limit)
        lam, saturated = bounded_exp(math.log(lam) + math.log1p(change), self.lambda_min, self.lambda_max)
        return Output(lam, p_term=change, saturated=saturated)
