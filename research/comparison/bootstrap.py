"""Means and paired differences of test scores of several seeds, with bootstrap intervals over seeds and documents.

Two arms are compared on the same seeds and the same documents, so both are drawn together: a replicate draws seeds,
then documents, and takes the same for both arms. Documents are crossed with seeds, not nested in them (every seed is
scored on all of them), so a replicate draws one set of documents for all its seeds; drawing again for each seed would
average the documents' differences away.

Of n units n - 1 are drawn: with n, the variance comes out (n - 1) / n of what it is, a fifth too small for five seeds
(Rao and Wu, "Resampling inference with complex survey data", JASA 83, 1988). The interval is the percentile interval.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from granite_scu.evaluation.statistics import DRAWS, LEVEL, Estimate, Floats


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
        return cls(counts(generator, n_seeds, draws), counts(generator, n_documents, draws))

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


def relative_excess(arm: Scores, reference: Scores, draws: int = DRAWS) -> Estimate:
    """The same as a share of the reference's bits per token."""
    return _estimate(lambda of_arm, of_reference: of_arm / of_reference - 1, draws, arm, reference)


def mean_relative_excess(pairs: list[Pair], draws: int = DRAWS) -> Estimate:
    """The relative excess, averaged over tasks: each draws seeds of its own, and those of one text the same documents.

    The tasks themselves are not drawn: the interval holds for these.
    """
    generator = np.random.default_rng(0)
    documents = {pair.text: counts(generator, len(pair.arm.tokens), draws) for pair in pairs}
    means, replicates = [], []
    for pair in pairs:
        _check_paired(pair.arm, pair.reference)
        of = Draws(counts(generator, len(pair.arm.nats), draws), documents[pair.text]).bits_per_token
        replicates.append(of(pair.arm) / of(pair.reference) - 1)
        means.append(pair.arm.bits_per_token.mean() / pair.reference.bits_per_token.mean() - 1)
    return _interval(float(np.mean(means)), np.mean(replicates, axis=0))


def _check_paired(arm: Scores, reference: Scores) -> None:
    assert arm.nats.shape == reference.nats.shape and np.array_equal(arm.tokens, reference.tokens)


def counts(generator: np.random.Generator, n: int, draws: int) -> Floats:
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
