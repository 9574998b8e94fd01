"""Adaptive KL: lambda follows how far training has moved the model."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from granite_scu.control.laws.base import Measurement, Output, Sensor, bounded_exp, check, clip
from granite_scu.control.laws.feedback import FeedbackState
from granite_scu.control.laws.filter import Ema, read

ERROR_LIMIT = 0.2
"""The largest relative error that a tick acts upon, as published."""


@dataclass(frozen=True)
class KL:
    """Each tick:

        e      = clip(KL / target_kl - 1, +- 0.2)
        lambda <- clip(lambda (1 + Kp e), lambda_min, lambda_max)

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2. There
    lambda weighs the KL itself; here it weighs ParamNPT, and the KL is only what is measured. They take 0.1 for the
    gain, over thousands of ticks; a run here has about a hundred.

    It does not track S, so it has no setpoint; ln S is smoothed for the log. A tick whose S or KL is not finite holds.

    Attributes:
        target_kl: setpoint of KL(adapted || as training began), in bits per token: from the base model, or from the
            adapter that training started from.
        kp: relative change of lambda per unit of relative error and tick; below 5, so that lambda stays positive.
        ema_alpha: weight of the newest ln S in the filter of the log, in (0, 1]; the KL is not smoothed.
        lambda_init: lambda before the first valid tick.
        lambda_min: lower bound of lambda, above 0.
        lambda_max: upper bound of lambda.
    """

    setpoint: ClassVar[None] = None

    target_kl: float = 0.1
    kp: float = 1.0
    ema_alpha: float = 0.5
    lambda_init: float = 0.5
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        check(self, "target_kl", "kp")
        if self.kp * ERROR_LIMIT >= 1:
            raise ValueError(f"kp {self.kp}: must be below {1 / ERROR_LIMIT:g}, or a tick could make lambda negative")

    @property
    def lambda_start(self) -> float:
        return self.lambda_init

    def sensor(self) -> Sensor:
        """Of the KL."""
        from research.laws.kl_from_start import KLFromStart  # late: it takes seconds, and a law alone needs none

        return KLFromStart()

    def init(self) -> FeedbackState:
        return FeedbackState(Ema(), Output(self.lambda_init))

    def update(self, state: FeedbackState, measurement: Measurement) -> tuple[FeedbackState, Output]:
        reading = read(state.ema, measurement, self.ema_alpha)
        kl = measurement.sensed.get("kl_bpt")
        # A window whose steps all failed has no S, whatever the KL says. An S of 0, before anything is learned, is one.
        if kl is None or not math.isfinite(kl) or not math.isfinite(measurement.s):
            return state, replace(state.output, held=True)
        change = self.kp * clip(kl / self.target_kl - 1, -ERROR_LIMIT, ERROR_LIMIT)
        wanted = math.log(state.output.lam) + math.log1p(change)
        lam, saturated = bounded_exp(wanted, self.lambda_min, self.lambda_max)
        output = Output(lam, smoothed=reading.smoothed, saturated=saturated)
        return FeedbackState(reading.ema, output), output
