"""Controllers that do not control: lambda is a constant, and S is smoothed for the log only."""

import math
from dataclasses import dataclass

from granite_scu.control.laws.base import require
from granite_scu.control.laws.open_loop import OpenLoop


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

    def strength(self, step: int, progress: float) -> float:
        return self.lambda_init


@dataclass(frozen=True)
class NoControl(OpenLoop):
    """No regularisation: lambda = 0. Attributes are those of ``OpenLoop``."""

    def strength(self, step: int, progress: float) -> float:
        return 0.0
