import pytest
from rounding import rounding
from running import cases

from benchmarks import scan
from benchmarks.scan import Case, with_linearity


@pytest.mark.slow
def test_it_agrees_with_the_reference():
    (case,) = cases("scan", "--lengths", "300", "--heads", "2", "--repeats", "1", "--precisions", "fp32")
    assert case["case"] == "fp32 2 x 300"
    assert case["max_rel_err"] < rounding(2 * 300 * 64)  # the gradient of a rate sums over tokens and states
    assert case["ours_us_per_token"] == pytest.approx(1e6 * case["ours_s"] / (2 * 300))
    assert case["linearity"] == 1.0


def test_time_per_token_is_compared_with_the_shortest_length_of_a_precision():
    found = with_linearity(
        [{"precision": "fp32", "length": length, "ours_us_per_token": each} for length, each in ((512, 3.0), (64, 2.0))]
    )
    assert [case["linearity"] for case in found] == [1.5, 1.0]


def test_a_reference_that_does_not_fit_is_left_out_with_a_reason():
    case = Case("fp32", 2, 8192, heads=2)
    assert scan.missing_memory(case, "cpu", copies=1) is None
    assert "GiB" in scan.missing_memory(case, "cpu", copies=10**9)
