"""Laws that heed no measurement: lambda follows from the place in the run, and S is smoothed for the log only."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from granite_scu.control.laws.base import Measurement, Output, check
from granite_scu.control.laws.filter import Ema, read


@dataclass(frozen=True)
class OpenLoop(ABC):
    """What such laws share. The state is the filter of ln S.

    Nothing is held but that filter: an S that cannot be used changes nothing about where the run stands.

    Attributes:
        setpoint: S* that the logged error refers to; lambda does not heed it.
        ema_alpha: weight of the newest ln S in the filter, in (0, 1]; 1 does not smooth.
    """

    needs_kl: ClassVar[bool] = False

    setpoint: float | None = None
    ema_alpha: float = 0.5

    def __post_init__(self) -> None:
        check(self)

    @property
    def initial_strength(self) -> float:
        return self.strength(step=0, progress=0.0)

    @abstractmethod
    def strength(self, step: int, progress: float) -> float:
        """Lambda from a tick on, by the optimizer steps done and the share of the run that they are, 0 to 1."""

    def init(self) -> Ema:
        return Ema()

    def update(self, state: Ema, measurement: Measurement) -> tuple[Ema, Output]:
        reading = read(state, measurement, self.ema_alpha, self.setpoint)
        output = Output(
            reg_strength=self.strength(measurement.step, measurement.progress),
            smoothed=reading.smoothed,
            error=reading.error,
            held=not reading.valid,
        )
        return reading.ema, output
