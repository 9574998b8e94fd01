"""The memory that training takes, predicted and measured."""

import devices
import pytest
from running import KNOWS_PEAKS

from benchmarks import memory
from benchmarks.training import Case


def test_the_cases_of_the_presets_are_those_that_a_gpu_can_compute():
    plain = ("--torch-compile=off", "--gradient-checkpointing=off")
    small = (*plain, "--4bit-quantization", "--lora-r=8")
    assert memory.preset_cases(devices.T4) == [
        ("whole", "fp16", 1, 1024, small),
        ("whole", "fp16", 1, 1792, small),
        ("whole", "fp16", 2, 1024, plain),
        ("whole", "fp16", 2, 1024, small),
        ("whole", "fp16", 3, 768, plain),
    ]
    assert {case[2:4] for case in memory.preset_cases(devices.H200X8)} >= {(1, 1024), (13, 2048), (32, 1024)}


@pytest.mark.slow
def test_cases_of_one_process_are_each_measured():
    cases = tuple(memory.Flagged(Case("embedded", "fp32", batch, 256), ()) for batch in (8, 16))
    rounds = []
    rows = memory.run_cases(cases, "cpu", lambda: rounds.append(1))
    assert [row["case"] for row in rows] == ["embedded fp32 8 x 256", "embedded fp32 16 x 256"] and len(rounds) == 3
    assert all(row["reason"] is None and row["predicted_gb"] > 0 for row in rows)
    if KNOWS_PEAKS:
        assert all(row["measured_gb"] > 0 for row in rows)
