import json

import pytest
from running import run


@pytest.mark.slow
def test_texts_in_a_batch_are_those_written_alone():
    ran = run(
        "generation", "--json", "--device", "cpu", "--precisions", "fp32", "--written", "samples", "--repeats", "1"
    )
    (case,) = json.loads(ran.stdout)
    assert case["reason"] is None and case["same"] == case["texts"] == 2
    assert case["speedup"] == pytest.approx(case["theirs_s"] / case["ours_s"])
    assert case["than_reference"] > 0
