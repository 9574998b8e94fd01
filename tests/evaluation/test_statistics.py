"""The bootstrap over documents against scipy, and on cases where the truth is known."""

import math

import numpy as np
import pytest

from granite_scu.evaluation.statistics import DRAWS, MIN_UNITS, difference_over_documents


def documents(generator: np.random.Generator, count: int, effect: float):
    """Skewed lengths, and documents that are harder or easier for both."""
    tokens = 1 + generator.lognormal(4, 0.5, count).astype(int)
    hardness = generator.normal(3, 0.5, count)
    change = effect * math.log(2) + generator.normal(0, 0.1, count)
    return (hardness + change) * tokens, hardness * tokens, tokens


def test_the_difference_over_documents_is_token_weighted_and_paired():
    arm, reference, tokens = documents(np.random.default_rng(0), 200, 0.05)
    found = difference_over_documents(arm, reference, tokens)
    assert found.mean == pytest.approx((arm.sum() - reference.sum()) / tokens.sum() / math.log(2))
    assert found.low < found.mean < found.high
    assert found.high - found.low < 0.1  # unpaired it would be five times as wide


@pytest.mark.parametrize("method", ["BCa", "percentile"])
def test_the_interval_over_documents_is_scipys(method, monkeypatch):
    """The same draws, whose quantiles are of the order of 0.1 and each of some hundred roundings."""
    stats = pytest.importorskip("scipy.stats")
    arm, reference, tokens = documents(np.random.default_rng(1), 250, 0.05)
    monkeypatch.setattr("granite_scu.evaluation.statistics.MAX_FOR_BCA", 250 if method == "BCa" else 249)
    monkeypatch.setattr("granite_scu.evaluation.statistics.CELLS_AT_A_TIME", 250 * 3000)
    found = difference_over_documents(arm, reference, tokens, seed=3)
    wanted = stats.bootstrap(
        ((arm - reference) / math.log(2), tokens),
        lambda bits, counts, axis: bits.sum(axis) / counts.sum(axis),
        paired=True, vectorized=True, n_resamples=DRAWS, batch=3000, method=method, rng=np.random.default_rng(3),
    ).confidence_interval  # fmt: skip
    assert [found.low, found.high] == pytest.approx([wanted.low, wanted.high], abs=1e-12)


def test_few_documents_give_no_interval():
    arm, reference, tokens = documents(np.random.default_rng(2), MIN_UNITS - 1, 1.0)
    found = difference_over_documents(arm, reference, tokens)
    assert math.isnan(found.low) and math.isnan(found.high) and not found.differs


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_documents_that_all_say_the_same_give_a_point(shift):
    tokens = np.arange(1, 30)
    reference = 3.0 * tokens
    found = difference_over_documents(reference + shift * tokens, reference, tokens)
    assert found.low == found.high == found.mean == pytest.approx(shift / math.log(2))
    assert found.differs is bool(shift)


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 100])
def test_coverage_over_documents_of_skewed_lengths(count):
    """Known truth: a 95 % interval holds it in 95 % of cases; of few documents the bootstrap is known to fall short."""
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        found = difference_over_documents(*documents(generator, count, 0.05))
        held += found.low <= 0.05 <= found.high
    assert (0.86 if count == 20 else 0.9) <= held / 400 <= 0.98
