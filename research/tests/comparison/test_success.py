"""What was called success before the first run is what is asked of the results."""

from dataclasses import replace

import numpy as np
import pytest

from research.comparison import report
from research.comparison.plan import Plan
from research.comparison.success import success
from research.tests.comparison.conftest import finish_run

SWEPT, RIVAL = 5.0, 5.05


@pytest.fixture
def judged_plan(protocol, evidence):
    """A plan whose judged arm, ``projection``, has these nats per token on the two tasks, on so many seeds."""

    def plan(first: float, second: float, seeds: int = 3) -> Plan:
        found = Plan(replace(protocol, judged="projection"), evidence)
        while (
            spec := next((s for s in found.open_runs() if s.arm != "projection" or s.seed < seeds), None)
        ) is not None:
            of_law = {"projection": (first, second)[spec.task.name == "second"], "fixed": SWEPT}
            nats = of_law.get(spec.arm, RIVAL)
            finish_run(evidence, spec, nats, (np.array([100, 200]) * nats).tolist(), (100, 200))
        return found

    return plan


@pytest.mark.parametrize(
    ("first", "second", "met"),
    [
        (4.95, 5.01, [True, True, True]),
        (5.055, 4.96, [True, False, True]),  # 1.1 and -0.8 %
        (5.02, 5.02, [False, True, True]),
        (5.06, 5.041, [False, False, False]),  # early stopping is lower
    ],
)
def test_each_criterion_is_judged_by_itself(judged_plan, first, second, met):
    found = success(judged_plan(first, second))
    assert [each["met"] for each in found] == met
    assert found[2]["found"] == pytest.approx((first + second) / 2 / RIVAL - 1, abs=1e-6)
    assert {each["seeds"] for each in found} == {3}


def test_seeds_that_are_missing_are_told(judged_plan):
    assert {each["seeds"] for each in success(judged_plan(4.95, 5.01, seeds=1))} == {1}


def test_a_rule_that_was_formed_on_the_tasks_is_not_tested_by_them(judged_plan):
    plan = judged_plan(4.95, 5.01)
    known = Plan(replace(plan.protocol, formed_on_all=("projection",)), plan.evidence)
    assert [each["tested"] for each in (*success(plan), *success(known))] == [True] * 3 + [False] * 3
    tables = [report._success({"success": success(each), "seeds": 3}).markdown() for each in (plan, known)]
    assert ["does not test it" in table for table in tables] == [False, True]


def test_nothing_is_judged_where_nothing_was_written_down_or_a_task_lacks_its_runs(protocol, evidence, judged_plan):
    assert success(Plan(replace(protocol, judged="projection"), evidence)) == []
    assert success(Plan(protocol, judged_plan(4.95, 5.01).evidence)) == []
