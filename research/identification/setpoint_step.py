"""A law whose setpoint steps at a given tick, to see how the closed loop follows."""

from dataclasses import dataclass, replace

from granite_scu.control.laws.base import Measurement, Output, require
from research.identification.wrapper import Wrapper, WrapperState


@dataclass(frozen=True)
class SetpointStep(Wrapper):
    """``law`` up to tick ``at``, from there on the same law, in the same state, with its setpoint times ``factor``.

    Attributes:
        law: the law, with the setpoint before the step.
        at: the first tick, counted from 0, that aims at the new setpoint.
        factor: new setpoint over old one, positive; the new one is a ratio in (0, 1) too.
    """

    at: int
    factor: float = 1.5

    def __post_init__(self) -> None:
        require(self.at >= 0, f"at {self.at}: must not be negative")
        require(self.factor > 0, f"factor {self.factor}: must be positive")
        replace(self.law, setpoint=self.law.setpoint * self.factor)  # refuses what is no ratio

    def update(self, state: WrapperState, measurement: Measurement) -> tuple[WrapperState, Output]:
        stepped = state.tick >= self.at
        law = replace(self.law, setpoint=self.law.setpoint * self.factor) if stepped else self.law
        law_state, output = law.update(state.law, measurement)
        return WrapperState(law_state, state.tick + 1), replace(output, setpoint=law.setpoint)
