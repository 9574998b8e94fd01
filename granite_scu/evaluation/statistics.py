"""The paired difference of two models on the same documents, with a bootstrap interval over these."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
LEVEL = 0.95
BY_CHANCE = 0.05
"""Probability below which more answers lost than won, or won than lost, are no chance."""
MIN_UNITS = 10
"""Documents below which no interval is given: of so few, no bootstrap covers what it promises."""
MAX_FOR_BCA = 3000
"""Documents above which the interval is the percentile interval: BCa's corrections have vanished there."""
CELLS_AT_A_TIME = 10_000_000
"""Numbers that the bootstrap over documents holds at a time."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean and the interval that holds it with ``LEVEL`` confidence; nan where there is none."""

    mean: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval lies to one side of 0."""
        return self.low > 0 or self.high < 0


def difference_over_documents(arm: Floats, reference: Floats, tokens: NDArray[np.int64], seed: int = 0) -> Estimate:
    """Bits per token that the arm costs more than the reference, with the BCa interval over documents.

    BCa is the bias-corrected and accelerated bootstrap (Efron, "Better bootstrap confidence intervals", JASA 82, 1987).
    Documents are drawn with their tokens, so that a replicate is token-weighted as the estimate is.

    Args:
        arm: (documents,) summed cross-entropy in nats.
        reference: the same documents' under the reference.
        tokens: (documents,) tokens scored, at least one each.
        seed: of the draws.

    Returns:
        An interval of nan for fewer than ``MIN_UNITS`` documents.
    """
    assert arm.shape == reference.shape == tokens.shape and tokens.min() > 0
    excess = (arm - reference) / math.log(2)
    mean = float(excess.sum() / tokens.sum())
    if len(tokens) < MIN_UNITS:
        return Estimate(mean, math.nan, math.nan)
    if np.ptp(excess / tokens) <= 1e-12:  # every document says the same, down to rounding: BCa would divide by 0
        return Estimate(mean, mean, mean)
    generator, n = np.random.default_rng(seed), len(tokens)
    at_a_time = max(1, CELLS_AT_A_TIME // n)
    replicates = []
    for first in range(0, DRAWS, at_a_time):
        drawn = generator.integers(0, n, (min(at_a_time, DRAWS - first), n))
        replicates.append(excess[drawn].sum(1) / tokens[drawn].sum(1))
    without = (excess.sum() - excess) / (tokens.sum() - tokens)
    low, high = _bca(mean, np.concatenate(replicates), without if n <= MAX_FOR_BCA else None)
    return Estimate(mean, low, high)


def _bca(mean: float, replicates: Floats, without: Floats | None) -> tuple[float, float]:
    """The interval, by equations 14.9 to 14.15 of Efron and Tibshirani, "An Introduction to the Bootstrap" (1993).

    Args:
        mean: of the sample.
        replicates: of the mean.
        without: (documents,) the mean without each of them; None takes the percentile interval.
    """
    normal, levels = NormalDist(), np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    if without is not None:
        below = float((replicates < mean).mean() + (replicates <= mean).mean()) / 2
        if not 0 < below < 1:  # no replicate on one side: there is nothing to correct by
            return math.nan, math.nan
        moved = without.mean() - without
        bias, acceleration = normal.inv_cdf(below), float((moved**3).sum() / (moved**2).sum() ** 1.5) / 6
        shifted = [bias + normal.inv_cdf(level) for level in levels]
        levels = np.array([normal.cdf(bias + shift / (1 - acceleration * shift)) for shift in shifted])
    low, high = np.quantile(replicates, levels)
    return float(low), float(high)


def sign_test(more: int, fewer: int) -> float:
    """Probability of so many changes of one kind, or more, among all that changed, if both kinds are as likely.

    >>> sign_test(5, 0), sign_test(3, 3), sign_test(0, 0)
    (0.03125, 0.65625, 1.0)
    """
    changed = more + fewer
    return sum(math.comb(changed, count) for count in range(more, changed + 1)) / 2**changed


def is_more(more: int, fewer: int, same: int, after: int) -> bool:
    """Whether chance does not explain the changes of one kind: by the sign test or, of few questions, by Fisher's exact
    test of the counts, each at half of ``BY_CHANCE``.

    >>> is_more(4, 0, 0, 4), is_more(3, 0, 0, 3), is_more(9, 6, 15, 20)
    (True, False, False)

    Args:
        more, fewer, same: answers that changed in that kind, in the other, and not.
        after: how many are of that kind now.
    """
    n, both = more + fewer + same, 2 * after - more + fewer
    ways = sum(math.comb(n, k) * math.comb(n, both - k) for k in range(after, min(n, both) + 1))
    return min(sign_test(more, fewer), ways / math.comb(2 * n, both)) < BY_CHANCE / 2
