"""Straight lines through points, with the uncertainty that their scatter leaves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Line:
    """A least-squares line.

    Attributes:
        slope: per unit of x.
        error: standard error of the slope, from residuals that are taken as independent.
        correlation: of neighbouring residuals, lag 1.
    """

    slope: float
    error: float
    correlation: float

    def corrected_error(self, count: int) -> float:
        """The standard error when neighbouring residuals are alike: ``count`` of them tell as much as fewer would.

        The effective number under a first-order correlation rho is n (1 - rho) / (1 + rho) (Bartlett 1946). The
        estimate of rho is biased low by about (1 + 4 rho) / n (Kendall 1954), so that much is added.
        """
        rho = self.correlation + (1 + 4 * max(0.0, self.correlation)) / count
        rho = min(max(rho, 0.0), 0.95)
        return self.error * math.sqrt((1 + rho) / (1 - rho))


def line(x: Sequence[float], y: Sequence[float]) -> Line:
    """The line through at least three points whose x are not all the same.

    >>> line([0, 1, 2, 3], [1, 3, 5, 7]).slope
    2.0
    """
    assert len(x) == len(y) >= 3
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((a - mean_x) ** 2 for a in x)
    assert spread > 0
    slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residuals = [b - mean_y - slope * (a - mean_x) for a, b in zip(x, y, strict=True)]
    left = math.fsum(r * r for r in residuals)
    neighbours = math.fsum(a * b for a, b in pairwise(residuals))
    return Line(
        slope=slope,
        error=math.sqrt(left / (len(x) - 2) / spread),
        correlation=neighbours / left if left > 0 else 0.0,
    )
