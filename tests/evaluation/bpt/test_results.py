"""Scores of windows that are put together by hand."""

from dataclasses import replace

import numpy as np
import pytest

from granite_scu.evaluation.bpt import results
from granite_scu.evaluation.bpt.windows import ScoringCorpus, cut
from granite_scu.model.description_length import LN2


def test_windows_in_which_nothing_is_learned_take_no_part():
    """Two conversations of eleven windows, of which one is the user's alone."""
    lengths = np.array([40, 48])
    targets = [np.ones(length, bool) for length in lengths]
    targets[1][8:16] = False
    sequences = [np.zeros(length + 1, np.int32) for length in lengths]
    corpus = ScoringCorpus("chats", ["a", "b"], sequences, lengths, targets, cut(lengths, 8, 8))
    counts = corpus.window_tokens
    assert sorted(counts)[:2] == [0, 8] and len(counts) == 11
    noise = np.random.default_rng(0).normal(0, 0.1, len(counts))
    corpus.nats.update({"base": 2.0 * counts, "adapter": (1.5 + noise) * counts})
    assert [results.units(replace(corpus, windows=corpus.windows[:n])) for n in (11, 9)] == ["windows", None]
    found = results.difference(corpus, "adapter", "base")
    assert found.mean == pytest.approx((noise[counts > 0].mean() - 0.5) / LN2)
    assert found.low < found.mean < found.high < 0
