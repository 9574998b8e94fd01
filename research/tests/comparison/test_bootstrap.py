"""The bootstrap over seeds and documents against plain loops, and on cases where the truth is known."""

import math

import numpy as np
import pytest

from granite_scu.evaluation.statistics import Estimate
from research.comparison.bootstrap import Draws, Scores, difference, mean, relative_excess

TOKENS = np.array([100, 40, 7, 300, 55])


def scores(generator: np.random.Generator, n_seeds: int = 4, tokens=TOKENS, shift: float = 0.0) -> Scores:
    per_token = generator.normal(4.0 + shift, 0.3, (n_seeds, len(tokens)))
    return Scores(per_token * tokens, tokens)


def plain_bits_per_token(scores: Scores, seeds: list[int], documents: list[int]) -> float:
    nats, tokens = 0.0, 0
    for seed in seeds:
        for document in documents:
            nats += scores.nats[seed, document]
            tokens += scores.tokens[document]
    return nats / tokens / math.log(2)


def drawn(counts) -> list[int]:
    return [unit for unit, count in enumerate(counts) for _ in range(int(count))]


def test_replicates_are_those_of_plain_loops():
    generator = np.random.default_rng(1)
    arm, reference = scores(generator), scores(generator)
    draws = Draws.make(4, 5, draws=50)
    fast = draws.bits_per_token(arm) - draws.bits_per_token(reference)
    for k in range(50):
        seeds, documents = drawn(draws.seeds[k]), drawn(draws.documents[k])
        plain = plain_bits_per_token(arm, seeds, documents) - plain_bits_per_token(reference, seeds, documents)
        assert fast[k] == pytest.approx(plain, abs=1e-12)


def test_the_interval_is_the_percentiles_of_the_replicates():
    generator = np.random.default_rng(2)
    arm, reference = scores(generator), scores(generator, shift=0.1)
    draws = Draws.make(4, 5)
    replicates = sorted(draws.bits_per_token(arm) - draws.bits_per_token(reference))
    found = difference(arm, reference)
    assert found.low == pytest.approx(replicates[250], abs=1e-4)
    assert found.high == pytest.approx(replicates[9750], abs=1e-4)
    assert found.mean == pytest.approx((arm.bits_per_token - reference.bits_per_token).mean())


def test_the_replicates_have_the_variance_of_the_mean():
    """Equal documents: only seeds vary, and the bootstrap's variance is the unbiased s^2 / n."""
    tokens = np.full(6, 50)
    level = np.random.default_rng(3).normal(4, 0.2, 5)
    arm = Scores(level[:, None] * tokens[None], tokens)
    replicates = Draws.make(5, 6, draws=100_000).bits_per_token(arm)
    assert replicates.var() == pytest.approx(arm.bits_per_token.var(ddof=1) / 5, rel=0.02)


@pytest.mark.parametrize(
    ("n_seeds", "tokens", "of_seeds", "of_documents"),
    [(5, [100] * 20, 0.02, 0.05), (10, [100] * 20, 0.02, 0.05), (3, [1890] + [100] * 23, 0.01, 0.1)],
    ids=["five seeds", "ten seeds", "three seeds and a long document"],
)
def test_coverage_on_normal_effects_of_seeds_and_documents(n_seeds, tokens, of_seeds, of_documents):
    """Known truth 0.05: the 95 % interval holds it in at least 84 % of cases; small n narrows it.

    The last as in the comparison: one document holds 45 % of the tokens; documents differ more than seeds.
    """
    generator, tokens, n = np.random.default_rng(4), np.array(tokens), len(tokens)
    held = 0
    for _ in range(300):
        effect = 0.05 + generator.normal(0, of_seeds, (n_seeds, 1)) + generator.normal(0, of_documents, (1, n))
        shared = generator.normal(4, 0.5, (1, n)) + generator.normal(0, 0.1, (n_seeds, n))
        found = difference(Scores((shared + effect) * tokens, tokens), Scores(shared * tokens, tokens), draws=500)
        held += found.low <= 0.05 / math.log(2) <= found.high
    assert 0.84 <= held / 300 <= 0.98


def test_pairing_takes_what_the_arms_share_out_of_the_interval():
    generator = np.random.default_rng(5)
    shared = generator.normal(4, 1.0, (5, 30)) * 100
    tokens = np.full(30, 100)
    reference = Scores(shared, tokens)
    arm = Scores(shared + 1.0 + generator.normal(0, 0.1, shared.shape), tokens)
    paired, alone = difference(arm, reference), mean(arm)
    assert paired.high - paired.low < 0.05 * (alone.high - alone.low)
    assert paired.low > 0


def test_an_arm_does_not_differ_from_itself():
    arm = scores(np.random.default_rng(6))
    assert difference(arm, arm) == Estimate(0.0, 0.0, 0.0)
    assert not difference(arm, arm).differs


def test_relative_excess_is_the_difference_over_the_reference():
    tokens = np.array([10, 20])
    reference = Scores(np.array([[10.0, 20.0]]), tokens)
    found = relative_excess(Scores(reference.nats * 1.02, tokens), reference)
    assert [found.mean, found.low, found.high] == pytest.approx([0.02] * 3)


def test_documents_without_tokens_do_no_harm():
    tokens = np.array([10, 0, 0, 0])
    found = mean(Scores(np.array([[7.0, 0, 0, 0]]), tokens))
    assert found.low == found.high == pytest.approx(0.7 / math.log(2))


def test_arms_on_other_documents_are_not_compared():
    arm = scores(np.random.default_rng(7))
    with pytest.raises(AssertionError):
        difference(arm, Scores(arm.nats, arm.tokens + 1))
