import pytest
from rounding import OF_EMBEDDED, rounding
from running import cases

SMALL = ("--model", "embedded", "--batch", "2", "--length", "32", "--repeats", "1", "--batches", "1")


@pytest.mark.slow
def test_both_sides_find_the_same_cross_entropy():
    once, four_times = cases("scoring", *SMALL, "--precisions", "fp32")
    for found in (once, four_times):
        assert found["max_rel_err"] < rounding(OF_EMBEDDED)
        assert found["ours_tokens_per_s"] == pytest.approx(3 * 32 * found["windows"] / found["ours_s"])
    assert (once["windows"], four_times["windows"]) == (2, 8)
