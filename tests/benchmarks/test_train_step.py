import pytest
from rounding import OF_EMBEDDED, rounding
from running import cases

from benchmarks import training
from granite_scu.config.settings import IGNORED

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


def test_theirs_is_given_the_chats_that_ours_packs_each_padded_to_the_longest():
    with training.of_chats(training.Case("embedded", "fp32", 1, 512), 8) as case:
        rows, data = training._rows(case, 0), training._data(case)
    lengths = [len(row["input_ids"]) for row in rows]
    assert len(rows) == 8 and case.block == len(data.train) < 8
    assert sum(lengths) <= case.text and max(lengths) > 2 * min(lengths)
    assert sum(int((row["labels"] != IGNORED).sum()) for row in rows) == data.train.n_supervised
    batch = training._padded(rows)
    assert batch["input_ids"].shape == (8, max(lengths)) and batch["attention_mask"].sum(1).tolist() == lengths
