"""What was called success before the first run is what is asked of the results."""

from dataclasses import replace

import pytest

from granite_scu.experiments.comparison.success import success


def line(name: str, *excess: float) -> dict:
    of_tasks = dict(zip(("first", "second"), excess, strict=False))
    return {"name": name, "excess": of_tasks, "mean": sum(excess) / len(excess), "worst": max(excess)}


@pytest.mark.parametrize(
    ("judged", "met"),
    [
        ((-0.01, 0.002), [True, True, True]),
        ((0.011, -0.008), [True, False, False]),  # 1.1 % on one task
        ((0.003, 0.003), [False, True, False]),
        ((-0.004, 0.0), [True, True, False]),  # early stopping is lower
    ],
)
def test_each_criterion_is_judged_by_itself(protocol, judged, met):
    found = success(replace(protocol, judged="pi"), [line("pi", *judged), line("early-stopping", -0.003, -0.003)])
    assert [each["met"] for each in found] == met


def test_nothing_is_judged_before_all_tasks_are_there(protocol):
    early = line("early-stopping", 0.0, 0.0)
    assert success(replace(protocol, judged="pi"), [line("pi", -0.01), early]) == []
    assert success(protocol, [line("pi", -0.01, 0.0), early]) == []  # of no arm was anything written down
