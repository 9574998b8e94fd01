import pytest
from rounding import OF_EMBEDDED, rounding
from running import cases

from benchmarks.controller_overhead import overhead
from benchmarks.gate import Outcome


def turns(*seconds: float) -> Outcome:
    return Outcome([{"seconds": each, "computed": each / 2, "extra_gb": 1.0} for each in (9.0, *seconds)])


@pytest.mark.slow
def test_scu_and_plain_lora_start_from_the_same_loss():
    (found,) = cases(
        "controller_overhead", "--model", "embedded", "--batch", "1", "--length", "16", "--repeats", "1",
        "--precisions", "fp32",
    )  # fmt: skip
    assert found["max_rel_err"] < rounding(OF_EMBEDDED)
    assert found["overhead"] == pytest.approx(found["ours_s"] / found["theirs_s"] - 1)
    assert found["goal_met"] == (found["overhead"] <= 0.05 and found["memory_ratio"] <= 1.02)


def test_overhead_is_of_the_medians_and_of_the_pairs():
    found = overhead(turns(1.01, 2.02, 3.03), turns(1.0, 2.0, 3.0))
    assert found["overhead"] == pytest.approx(0.01)
    assert found["overhead_paired"] == found["overhead_computed"] == pytest.approx(0.01)
    assert found["goal_met"]
    assert overhead(turns(1.0), Outcome(reason="out of memory"))["overhead"] is None
