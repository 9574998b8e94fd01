"""What laws with a single term on the error in ln S share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from granite_scu.control.laws.base import Measurement, Output, check
from granite_scu.control.laws.filter import Ema, read


@dataclass(frozen=True)
class FeedbackState:
    """What one tick leaves to the next.

    Attributes:
        ema: filter of ln S.
        output: the last output that was not held; a tick without a valid measurement repeats it.
    """

    ema: Ema
    output: Output


@dataclass(frozen=True)
class Feedback(ABC):
    """Smooths ln S, holds where there is none, and leaves lambda to ``act``.

    Attributes:
        setpoint: S*, a ratio in (0, 1).
        ema_alpha: weight of the newest ln S in the filter, in (0, 1]; 1 does not smooth.
        lambda_init: lambda before the first valid tick.
        lambda_min: lower bound of lambda, above 0.
        lambda_max: upper bound of lambda.
    """

    setpoint: float
    ema_alpha: float = 0.5
    lambda_init: float = 0.5
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        check(self)

    @abstractmethod
    def act(self, error: float, lam: float) -> Output:
        """Lambda for an error in ln S, with the terms it is made of, from the lambda so far."""

    @property
    def lambda_start(self) -> float:
        return self.lambda_init

    def init(self) -> FeedbackState:
        return FeedbackState(Ema(), Output(self.lambda_init))

    def update(self, state: FeedbackState, measurement: Measurement) -> tuple[FeedbackState, Output]:
        reading = read(state.ema, measurement, self.ema_alpha, self.setpoint)
        if not reading.valid:
            return state, replace(state.output, held=True)
        assert reading.error is not None
        acted = self.act(reading.error, state.output.lam)
        output = replace(acted, smoothed=reading.smoothed, error=reading.error)
        return FeedbackState(reading.ema, output), output
