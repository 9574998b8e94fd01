"""Laws that use no measurement: lambda follows from the place in the run, and S is smoothed for the log only."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from granite_scu.control.laws.base import Measurement, Output, check, clip, require
from granite_scu.control.laws.filter import Ema, read


@dataclass(frozen=True)
class OpenLoop(ABC):
    """What such laws share. The state is the filter of ln S.

    Nothing is held but that filter: an S that cannot be used changes nothing about where the run stands.

    Attributes:
        setpoint: S* that the logged error refers to; lambda does not use it.
        ema_alpha: weight of the newest ln S in the filter, in (0, 1]; 1 does not smooth.
    """

    setpoint: float | None = None
    ema_alpha: float = 0.5

    def __post_init__(self) -> None:
        check(self)

    @property
    def lambda_start(self) -> float:
        return self.at(step=0, progress=0.0)

    @abstractmethod
    def at(self, step: int, progress: float) -> float:
        """Lambda from a tick on, by the optimizer steps done and the share of the run that they are, 0 to 1."""

    def init(self) -> Ema:
        return Ema()

    def update(self, state: Ema, measurement: Measurement) -> tuple[Ema, Output]:
        reading = read(state, measurement, self.ema_alpha, self.setpoint)
        output = Output(
            lam=self.at(measurement.step, measurement.progress),
            smoothed=reading.smoothed,
            error=reading.error,
            held=not reading.valid,
        )
        return reading.ema, output


@dataclass(frozen=True)
class Fixed(OpenLoop):
    """Lambda stays where it starts.

    Attributes, besides those of ``OpenLoop``:
        lambda_init: lambda, not negative.
    """

    lambda_init: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.lambda_init < math.inf, f"lambda_init {self.lambda_init}: must be finite and not negative")

    def at(self, step: int, progress: float) -> float:
        return self.lambda_init


@dataclass(frozen=True)
class NoControl(OpenLoop):
    """No regularisation: lambda = 0. Attributes are those of ``OpenLoop``."""

    def at(self, step: int, progress: float) -> float:
        return 0.0


@dataclass(frozen=True)
class Schedule(OpenLoop):
    """Lambda = lambda_init + w (lambda_end - lambda_init), with w from 0 to 1 over the run's optimizer steps.

    Attributes, besides those of ``OpenLoop``:
        lambda_init: lambda at the start.
        lambda_end: lambda at the last step.
        lambda_min: lower bound of both, above 0.
        lambda_max: upper bound of both.
    """

    lambda_init: float = 0.5
    lambda_end: float = 0.05
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    @staticmethod
    @abstractmethod
    def weight(progress: float) -> float:
        """How much of the way from lambda_init to lambda_end is behind, 0 to 1."""

    def at(self, step: int, progress: float) -> float:
        weight = self.weight(clip(progress, 0.0, 1.0))
        # Weighed, not added to: at both ends this is exact.
        lam = (1 - weight) * self.lambda_init + weight * self.lambda_end
        return clip(lam, self.lambda_min, self.lambda_max)


@dataclass(frozen=True)
class Linear(Schedule):
    """In a straight line, in lambda and not in its logarithm.

    >>> Linear(lambda_init=1.0, lambda_end=0.5).at(step=5, progress=0.5)
    0.75
    """

    @staticmethod
    def weight(progress: float) -> float:
        return progress


@dataclass(frozen=True)
class Cosine(Schedule):
    """Along half a cosine: slow, fast, slow, as Loshchilov and Hutter, "SGDR" (2017), lower a learning rate."""

    @staticmethod
    def weight(progress: float) -> float:
        return (1 - math.cos(math.pi * progress)) / 2
