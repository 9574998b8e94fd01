"""What a law that acts around another law has in common with its like."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Wrapper:
    """Starts as the wrapped law does. What becomes of its outputs, an ``update`` says.

    Attributes:
        law: the wrapped law.
    """

    law: PI

    @property
    def setpoint(self) -> float:
        return self.law.setpoint

    @property
    def lambda_start(self) -> float:
        return self.law.lambda_start

    def init(self) -> WrapperState:
        return WrapperState(self.law.init())
