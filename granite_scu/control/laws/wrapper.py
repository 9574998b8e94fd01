"""What a law that acts around another law has in common with its like."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from granite_scu.control.laws.base import Measurement, Output
from granite_scu.control.laws.pi import PI, PIState


@dataclass(frozen=True)
class WrapperState:
    """What one tick leaves to the next.

    Attributes:
        law: state of the wrapped law.
        tick: ticks done, those without a valid measurement included.
    """

    law: PIState
    tick: int = 0


StateT = TypeVar("StateT", bound=WrapperState)


@dataclass(frozen=True)
class Wrapper(ABC, Generic[StateT]):
    """Starts as the wrapped law does, and leaves to ``update`` what becomes of its outputs.

    Attributes:
        law: the wrapped law.
    """

    needs_kl: ClassVar[bool] = False

    law: PI

    @property
    def setpoint(self) -> float:
        return self.law.setpoint

    @property
    def initial_strength(self) -> float:
        return self.law.initial_strength

    @abstractmethod
    def init(self) -> StateT: ...

    @abstractmethod
    def update(self, state: StateT, measurement: Measurement) -> tuple[StateT, Output]: ...
