import pytest
from rounding import OF_EMBEDDED, rounding
from running import cases

SMALL = ("--model", "embedded", "--batch", "2", "--length", "32", "--repeats", "1")


@pytest.mark.slow
def test_the_loss_curves_coincide():
    (found,) = cases("train_step", *SMALL, "--precisions", "fp32", "--block", "2", "--peak-tflops", "1")
    assert found["max_rel_err"] < rounding(OF_EMBEDDED)
    assert found["ours_last_loss"] == pytest.approx(found["theirs_last_loss"], rel=rounding(OF_EMBEDDED))
    assert found["first_loss"] != found["ours_last_loss"]
    assert found["ours_tokens_per_s"] == pytest.approx(2 * 32 / found["ours_s"])
    assert 0 < found["ours_mfu"] < 1


@pytest.mark.slow
def test_a_variant_of_ours_trains_the_same_and_is_measured():
    (found,) = cases("train_step", *SMALL, "--precisions", "fp32", "--block", "2", "--variants", "recomputed")
    assert found["recomputed_reason"] is None and found["recomputed_s"] > 0
    assert found["recomputed_last_loss"] == pytest.approx(found["ours_last_loss"], rel=rounding(OF_EMBEDDED))
