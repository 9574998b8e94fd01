"""Laws against rivals over several tasks, on evidence whose truth is known."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from research.comparison import report, results
from research.comparison.bootstrap import Pair, Scores, mean_relative_excess, relative_excess
from research.comparison.evidence import Evidence
from research.comparison.pairs import pairs
from research.comparison.plan import Plan
from research.comparison.protocol import AUTO, CASCADE, FIXED
from research.tests.comparison.conftest import finish_run, lose

TOKENS = np.array([400, 100, 100, 100, 50])
COST = {"cascade": 3.9, "pi-auto": 4.0, "none": 4.2}


def cost(spec) -> float:
    """Nats per token: of the fixed lambdas 0.03 is best on the first task, 0.1 on the second and over both."""
    by_lambda = {0.03: (4.0, 4.5), 0.1: (4.1, 4.1)}
    if spec.arm == "fixed":
        return by_lambda[spec.settings["control.lambda_init"]][spec.task.name == "second"]
    return COST.get(spec.arm, 4.3)


def finished_plan(protocol, evidence) -> Plan:
    """The longest document costs the cascade twice as much as it would, on the second task alone."""
    arms = (*protocol.arms, FIXED[1], AUTO, CASCADE)
    found = Plan(replace(protocol, arms=arms, unseen=("first", "second"), formed_on_all=("pi-auto",)), evidence)
    while (spec := found.next()) is not None:
        noise = 0.001 * np.random.default_rng(spec.seed).normal(size=len(TOKENS))
        nats = (cost(spec) + noise) * TOKENS
        if spec.arm == "cascade" and spec.task.name == "second":
            nats[0] *= 2
        finish_run(evidence, spec, cost(spec), nats.tolist(), TOKENS.tolist())
    return found


@pytest.fixture
def plan(protocol, evidence) -> Plan:
    return finished_plan(protocol, evidence)


@pytest.fixture(scope="module")
def reported(protocol, tmp_path_factory) -> dict:
    """What is reported of such a plan."""
    return results.report(finished_plan(protocol, Evidence(tmp_path_factory.mktemp("evidence"))))


def line(found: list[dict], arm: str, rival: str) -> dict:
    return next(line for line in found if (line["arm"], line["rival"]) == (arm, rival))


def test_the_average_over_tasks_and_where_it_is_shown(reported):
    found = line(reported["pairs"], "pi-auto", "none")
    assert found["tasks"] == {"first": 3, "second": 3}
    assert found["excess"]["mean"] == pytest.approx(4.0 / 4.2 - 1, abs=1e-4)
    assert found["excess_of_unseen"] is None  # its rule was chosen on all tasks
    assert found["excess"]["low"] < found["excess"]["mean"] < found["excess"]["high"] < 0
    assert (found["better"], found["worse"]) == (["first", "second"], [])


def test_rivals_that_are_no_arm_are_chosen_by_validation(reported):
    found = reported["pairs"]
    swept = (4.0 / 4.0 + 4.0 / 4.1) / 2 - 1  # on each task its own best
    assert line(found, "pi-auto", "swept λ")["excess"]["mean"] == pytest.approx(swept, abs=1e-4)
    one = (4.0 / 4.1 + 4.0 / 4.1) / 2 - 1
    assert line(found, "pi-auto", "one fixed (λ=0.1)")["excess"]["mean"] == pytest.approx(one, abs=1e-4)


def test_one_setting_may_be_asked_about_too(plan, monkeypatch):
    monkeypatch.setattr("research.comparison.pairs.QUESTIONS", {"one fixed": ("none",)})
    (found,) = pairs(plan)
    assert (found["arm"], found["rival"]) == ("one fixed (λ=0.1)", "none")
    assert found["verdict"].startswith("one fixed (λ=0.1) against none, over 2 tasks: better by")
    assert found["excess"]["mean"] == pytest.approx(4.1 / 4.2 - 1, abs=1e-4)


def test_what_hangs_on_one_document_shows(reported):
    found = line(reported["pairs"], "cascade", "none")
    assert found["without_largest"] == pytest.approx(3.9 / 4.2 - 1, abs=1e-3)
    assert found["excess"]["mean"] > 0.1 and found["excess"]["low"] < 0
    assert found["excess_of_unseen"] == found["excess"]  # both tasks of this protocol are


def test_the_task_that_the_setpoint_was_chosen_on_says_nothing_of_pi(reported):
    """That leaves one task of two, which needs no average."""
    assert not [line for line in reported["pairs"] if "pi" in (line["arm"], line["rival"])]


def test_a_setting_that_failed_once_is_not_the_one_for_all(plan):
    lose(plan.evidence, "fixed", setting="λ=0.1")
    found = pairs(Plan(plan.protocol, plan.evidence))
    assert not [line for line in found if line["rival"].startswith("one fixed")]  # the other task alone is no average
    assert line(found, "pi-auto", "none")


def verdict(found: list[dict], arm: str, rival: str) -> str:
    return line(found, arm, rival)["verdict"]


def test_each_pair_has_a_sentence_that_says_what_is_shown(reported):
    found = reported["pairs"]
    better = line(found, "pi-auto", "none")["excess"]
    words = f"better by 4.76% ({-better['high']:.2%} to {-better['low']:.2%})"
    assert verdict(found, "pi-auto", "none") == f"pi-auto against none, over 2 tasks: {words}"
    assert verdict(found, "pi-auto", "swept λ").startswith("pi-auto against swept λ, over 2 tasks: better by 1.2")
    assert "cascade against none, over 2 tasks: no difference shown (+" in verdict(found, "cascade", "none")
    shown = report.markdown(reported)
    assert all(f"\n- {line['verdict']}\n" in shown for line in found)
    console = Console(file=StringIO(), width=200)
    report.show(reported, console)
    text = console.file.getvalue()
    assert "The laws against their rivals, over all tasks" in text and "without the longest document" in text
    assert f"pi-auto against none, over 2 tasks: {words}" in text


def test_a_sentence_of_two_seeds_says_that_they_decide_nothing(plan):
    shown = results.report(Plan(plan.protocol, plan.evidence, seeds=2))
    found = line(shown["pairs"], "pi-auto", "none")
    assert found["tasks"] == {"first": 2, "second": 2} and found["better"] == found["worse"] == []
    assert found["verdict"] == "pi-auto against none, over 2 tasks: two seeds decide nothing (-4.76%)"
    assert "| pi-auto | none | 2 (2) | -4.76% [" in report.markdown(shown)
    key = next(r["key"] for r in plan.evidence if (r["arm"], r["task"], r["seed"]) == ("pi-auto", "second", 2))
    del plan.evidence.records[key]
    some = verdict(pairs(Plan(plan.protocol, plan.evidence)), "pi-auto", "none")
    assert some == "pi-auto against none, over 2 tasks: two seeds on 1 of them decide nothing (-4.76%)"


def test_a_task_that_was_lost_leaves_the_average_of_the_others_open(protocol, evidence, finish, plan):
    """Else a law that diverges would be judged by the tasks on which it does not."""
    tasks = (*plan.protocol.tasks, replace(plan.protocol.tasks[1], name="third", train_tokens=2048))
    three = Plan(replace(plan.protocol, tasks=tasks), evidence)
    while (spec := three.next()) is not None:
        record = finish(spec, cost(spec), (cost(spec) * TOKENS).tolist(), TOKENS.tolist())
        if (spec.arm, spec.seed) == ("pi-auto", 1):
            record["failed"] = "not finite"
    found = pairs(three)
    words = "pi-auto against none, over 2 tasks: runs that failed on third leave it open (-4.76%)"
    assert verdict(found, "pi-auto", "none") == words
    assert verdict(found, "cascade", "none").startswith("cascade against none, over 3 tasks: no difference shown")


def test_a_sweep_that_is_not_finished_is_no_rival_yet(evidence, finish, plan):
    """Nor is a task of it lost on which a run failed."""
    assert line(pairs(plan), "cascade", "swept λ")
    wider = Plan(replace(plan.protocol, arms=(*plan.protocol.arms, FIXED[3])), evidence)
    assert not [found for found in pairs(wider) if found["rival"] == "swept λ"]
    tasks = (*plan.protocol.tasks, replace(plan.protocol.tasks[1], name="third", train_tokens=2048))
    three = Plan(replace(wider.protocol, tasks=tasks), evidence)
    open_keys: set[str] = set()
    while (spec := three.next(lambda spec: spec.key in open_keys)) is not None:
        if spec.task.name == "third" and spec.setting == FIXED[3].setting:
            open_keys.add(spec.key)
            continue
        record = finish(spec, cost(spec) if spec.setting != FIXED[3].setting else 5.0, TOKENS.tolist(), TOKENS.tolist())
        if spec.task.name == "third" and spec.setting == FIXED[1].setting:
            record["failed"] = "not finite"
    found = line(pairs(three), "cascade", "swept λ")
    assert list(found["tasks"]) == ["first", "second"] and found["lost"] == []


def test_one_task_is_no_average(plan):
    assert pairs(Plan(plan.protocol, plan.evidence, tasks=["first"])) == []


def scores(generator: np.random.Generator, cost: float) -> Scores:
    return Scores((cost + 0.2 * generator.normal(size=(3, 1)) + generator.normal(size=(1, 5))) * TOKENS, TOKENS)


def test_the_average_of_one_task_is_its_own_excess():
    generator = np.random.default_rng(0)
    arm, reference = scores(generator, 10.0), scores(generator, 9.0)
    found, alone = mean_relative_excess([Pair(arm, reference, "a")]), relative_excess(arm, reference)
    assert found.mean == pytest.approx(alone.mean)
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high), abs=0.01)


def test_tasks_on_the_same_documents_vary_together():
    """Two tasks with equal scores: on the same documents the average is as uncertain as one, on others less so."""
    generator = np.random.default_rng(0)
    arm, reference = scores(generator, 10.0), scores(generator, 10.0)
    same = mean_relative_excess([Pair(arm, reference, "a"), Pair(arm, reference, "a")])
    other = mean_relative_excess([Pair(arm, reference, "a"), Pair(arm, reference, "b")])
    assert (other.high - other.low) < 0.8 * (same.high - same.low)
