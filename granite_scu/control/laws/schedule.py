"""Schedules: lambda goes from one value to another over the run, whatever S does."""

import math
from abc import abstractmethod
from dataclasses import dataclass

from granite_scu.control.laws.base import clip
from granite_scu.control.laws.open_loop import OpenLoop


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

    def strength(self, step: int, progress: float) -> float:
        weight = self.weight(clip(progress, 0.0, 1.0))
        # Weighed, not added to: at both ends this is exact.
        strength = (1 - weight) * self.lambda_init + weight * self.lambda_end
        return clip(strength, self.lambda_min, self.lambda_max)


@dataclass(frozen=True)
class Linear(Schedule):
    """In a straight line, in lambda and not in its logarithm.

    >>> Linear(lambda_init=1.0, lambda_end=0.5).strength(step=5, progress=0.5)
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
