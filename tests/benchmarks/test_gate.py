import os

import pytest
from running import KNOWS_PEAKS

from benchmarks.gate import GIB, Gate, race


def taking(gate: Gate, gib: float) -> None:
    """Loads much, works with ``gib``."""
    loaded = b"\1" * (GIB // 8)
    assert loaded
    while True:
        gate.wait(lambda: {"process": os.getpid(), "gpus": os.environ["CUDA_VISIBLE_DEVICES"]})
        taken = b"\1" * int(gib * GIB)
        del taken


def failing(gate: Gate) -> None:
    gate.wait()
    raise ValueError("no more")


@pytest.mark.slow
def test_each_side_is_measured_in_its_own_process_without_what_it_loaded_and_one_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # of which Hugging Face's Trainer would take both
    sides = {"more": (taking, (0.25,)), "less": (taking, (0.0625,)), "bad": (failing, ())}
    outcomes = race(sides, "cpu", repeats=2)
    bad = outcomes.pop("bad")
    assert bad.reason == "ValueError: no more"
    assert bad.seconds is None and bad.extra_gb is None
    assert len({outcome.reports[0]["process"] for outcome in outcomes.values()} | {os.getpid()}) == 3
    assert {report["gpus"] for outcome in outcomes.values() for report in outcome.reports} == {"2"}
    if KNOWS_PEAKS:
        assert outcomes["more"].extra_gb == pytest.approx(0.25, abs=0.02)
        assert outcomes["less"].extra_gb == pytest.approx(0.0625, abs=0.02)
    assert [len(outcome.reports) for outcome in outcomes.values()] == [3, 3]
    assert all(outcome.seconds > 0 for outcome in outcomes.values())
