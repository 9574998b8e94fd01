"""Means and paired differences of test scores, with bootstrap intervals over seeds and documents.

Two models on the same documents, one run of each: ``difference_over_documents``. The rest is for several seeds of each,
as a comparison of controllers has them. There two arms are compared on the same seeds and the same documents, so both
are drawn together: a replicate draws seeds, then documents, and takes the same for both arms. Documents are crossed
with seeds, not nested in them (every seed is scored on all of them), so a replicate draws one set of documents for all
its seeds; drawing again for each seed would average the documents' differences away.

Of n units n - 1 are drawn: with n, the variance comes out (n - 1) / n of what it is, a fifth too small for five seeds
(Rao and Wu, "Resampling inference with complex survey data", JASA 83, 1988). The interval is the percentile interval.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
LEVEL = 0.95
LEAST_UNITS = 10
"""Documents below which no interval is given: of so few, no bootstrap covers what it promises."""
MOST_FOR_BCA = 3000
"""Documents above which the interval is the percentile interval: BCa's corrections have vanished there."""
CELLS_AT_A_TIME = 10_000_000
"""Numbers that the bootstrap over documents holds at a time."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scores:
    """What an arm scored on a task's test documents.

    Attributes:
        nats: (seeds, documents) summed cross-entropy.
        tokens: (documents,) supervised tokens, the same for all seeds.
    """

    nats: Floats
    tokens: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert self.nats.ndim == 2 and self.nats.shape[1] == len(self.tokens) and self.nats.size

    @property
    def bits_per_token(self) -> Floats:
        """Token-weighted, (seeds,)."""
        return self.nats.sum(1) / self.tokens.sum() / math.log(2)


@dataclass(frozen=True, eq=False)
class Pair:
    """Two arms on one task, with the same seeds; pairs of equal ``text`` were scored on the same documents."""

    arm: Scores
    reference: Scores
    text: str


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


@dataclass(frozen=True, eq=False)
class Draws:
    """How often each replicate drew each unit: (draws, seeds) and (draws, documents)."""

    seeds: Floats
    documents: Floats

    @classmethod
    @lru_cache(maxsize=4)  # a report asks for the same draws at every row of a task
    def make(cls, n_seeds: int, n_documents: int, draws: int = DRAWS, seed: int = 0) -> "Draws":
        """Equal arguments give equal draws. A single seed or document is always drawn: its variance is unknown."""
        generator = np.random.default_rng(seed)
        return cls(_counts(generator, n_seeds, draws), _counts(generator, n_documents, draws))

    def bits_per_token(self, scores: Scores) -> Floats:
        """The score of each replicate, (draws,); nan where no drawn document has a token."""
        nats = ((self.seeds @ scores.nats) * self.documents).sum(1)
        tokens = self.seeds.sum(1) * (self.documents @ scores.tokens)
        with np.errstate(invalid="ignore"):
            return nats / tokens / math.log(2)


def mean(scores: Scores, draws: int = DRAWS) -> Estimate:
    """Bits per token over seeds and documents."""
    return _estimate(lambda of_arm: of_arm, draws, scores)


def difference(arm: Scores, reference: Scores, draws: int = DRAWS) -> Estimate:
    """Bits per token that the arm costs more than the reference; paired, so both hold the same seeds and documents."""
    return _estimate(lambda of_arm, of_reference: of_arm - of_reference, draws, arm, reference)


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
        An interval of nan for fewer than ``LEAST_UNITS`` documents.
    """
    assert arm.shape == reference.shape == tokens.shape and tokens.min() > 0
    excess = (arm - reference) / math.log(2)
    mean = float(excess.sum() / tokens.sum())
    if len(tokens) < LEAST_UNITS:
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
    low, high = _bca(mean, np.concatenate(replicates), without if n <= MOST_FOR_BCA else None)
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


def relative_excess(arm: Scores, reference: Scores, draws: int = DRAWS) -> Estimate:
    """The same as a share of the reference's bits per token."""
    return _estimate(lambda of_arm, of_reference: of_arm / of_reference - 1, draws, arm, reference)


def mean_relative_excess(pairs: list[Pair], draws: int = DRAWS) -> Estimate:
    """The relative excess, averaged over tasks: each draws seeds of its own, and those of one text the same documents.

    The tasks themselves are not drawn: the interval holds for these.
    """
    generator = np.random.default_rng(0)
    documents = {pair.text: _counts(generator, len(pair.arm.tokens), draws) for pair in pairs}
    means, replicates = [], []
    for pair in pairs:
        _check_paired(pair.arm, pair.reference)
        of = Draws(_counts(generator, len(pair.arm.nats), draws), documents[pair.text]).bits_per_token
        replicates.append(of(pair.arm) / of(pair.reference) - 1)
        means.append(pair.arm.bits_per_token.mean() / pair.reference.bits_per_token.mean() - 1)
    return _interval(float(np.mean(means)), np.mean(replicates, axis=0))


def verdict(arm: str, reference: str, estimate: Estimate) -> str:
    """One sentence on a paired difference.

    >>> verdict("fixed", "pi", Estimate(0.02, -0.01, 0.05))
    'no difference shown between fixed and pi (+0.0200 bits/token, nominal 95 % interval -0.0100 to +0.0500)'
    >>> verdict("fixed", "pi", Estimate(0.02, 0.01, 0.05))
    'fixed is worse than pi by 0.0200 bits/token (nominal 95 % interval +0.0100 to +0.0500)'
    >>> verdict("fixed", "pi", Estimate(0.02, math.nan, math.nan))
    'no difference shown between fixed and pi (+0.0200 bits/token, too few documents for an interval)'
    """
    interval = f"nominal 95 % interval {estimate.low:+.4f} to {estimate.high:+.4f}"
    if math.isnan(estimate.low):
        interval = "too few documents for an interval"
    if not estimate.differs:
        return f"no difference shown between {arm} and {reference} ({estimate.mean:+.4f} bits/token, {interval})"
    word = "worse" if estimate.mean > 0 else "better"
    return f"{arm} is {word} than {reference} by {abs(estimate.mean):.4f} bits/token ({interval})"


def _check_paired(arm: Scores, reference: Scores) -> None:
    assert arm.nats.shape == reference.nats.shape and np.array_equal(arm.tokens, reference.tokens)


def _counts(generator: np.random.Generator, n: int, draws: int) -> Floats:
    """How often each of n units is drawn, (draws, n): n - 1 of them, but one where there is but one."""
    return generator.multinomial(max(n - 1, 1), np.full(n, 1 / n), draws).astype(np.float64)


def _estimate(statistic: Callable[..., Floats], draws: int, *paired: Scores) -> Estimate:
    """A statistic of bits per token, on the scores themselves and on each replicate of them."""
    _check_paired(paired[0], paired[-1])
    replicated = map(Draws.make(*paired[0].nats.shape, draws).bits_per_token, paired)
    return _interval(float(statistic(*(scores.bits_per_token.mean() for scores in paired))), statistic(*replicated))


def _interval(mean: float, replicates: Floats) -> Estimate:
    """The percentile interval."""
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(replicates, [tail, 100 - tail])
    return Estimate(mean, float(low), float(high))
