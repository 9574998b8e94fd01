"""What is said about evidence whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest

from granite_scu.config.errors import UserError
from granite_scu.evaluation.statistics import Estimate
from research.comparison import report, results
from research.comparison.evidence import Evidence
from research.comparison.plan import Plan
from research.comparison.protocol import AUTO, CASCADE, FIXED
from research.comparison.results import outcome
from research.tests.comparison.conftest import finish_run, lose


@pytest.fixture(scope="module")
def found(protocol, tmp_path_factory) -> dict:
    """What is reported of ``cost``."""
    return results.report(finished_plan(protocol, Evidence(tmp_path_factory.mktemp("evidence")), cost))


@pytest.fixture
def finished(protocol, evidence):
    """A plan whose runs cost, in nats per token, what ``costs`` says of their arm and setting, with a seed's noise."""
    return lambda costs: finished_plan(protocol, evidence, costs)


def finished_plan(protocol, evidence, costs) -> Plan:
    plan = Plan(protocol, evidence)
    while specs := list(plan.open_runs()):
        for spec in specs:
            if evidence.get(spec) is None:  # two arms may share a run
                cost = costs(spec)
                noise = 0.001 * np.random.default_rng(spec.seed).normal(size=12)
                finish_run(evidence, spec, cost, ((cost + noise) * 100).tolist(), tokens=[100] * 12)
    return plan


def cost(spec) -> float:
    if spec.settings["control.controller"] == "none":
        return 5.0
    at_chosen = spec.arm in ("pi", "pi-swept") and spec.settings["control.target_s"] == 0.2
    return 4.0 if at_chosen else 4.002 if spec.arm == "fixed" else 4.5


def row(found: dict, task: int, name: str) -> dict:
    return next(row for row in found["tasks"][task]["rows"] if row["name"].startswith(name))


def test_each_arm_is_compared_with_pi_at_the_chosen_setpoint(found):
    assert found["setpoint"] == 0.2 and not found["setpoint_is_provisional"]
    none = row(found, 1, "none")
    assert none["verdict"].startswith("none is worse than pi (S* = 0.2) by 1.4427 bits/token")
    assert none["difference"]["mean"] == pytest.approx(1 / np.log(2), abs=1e-6)
    assert row(found, 1, "pi (")["verdict"] is None


def test_where_no_setpoint_is_chosen_nothing_is_claimed_and_the_arms_are_compared(protocol, evidence, finish):
    arms = (*FIXED[:2], AUTO, CASCADE)
    free = replace(protocol, arms=arms, rates=(1e-3,), swept_pi=(), selection_task=None)
    plan, costs = Plan(free, evidence), {"fixed": 5.0, "pi-auto": 4.0, "cascade": 4.5}
    while (spec := plan.next()) is not None:
        finish(spec, validation=costs.get(spec.arm, 6.0))
    found = results.report(plan)
    assert found["claims"] == {} and found["setpoint"] is None and "claim" not in report.markdown(found)
    lines = {(line["arm"], line["rival"]): line for line in found["pairs"]}
    assert lines["pi-auto", "one fixed (λ=0.01)"]["verdict"].startswith(
        "pi-auto against one fixed (λ=0.01), over 2 tasks: better by 20"
    )
    assert lines["cascade", "pi-auto"]["excess"]["mean"] == pytest.approx(4.5 / 4 - 1)


def test_without_pi_the_first_arm_is_what_the_others_are_compared_with(finished, evidence):
    plan = finished(cost)
    found = results.report(Plan(plan.protocol, evidence, arms=["none", "early-stopping", "fixed"]))
    assert found["tasks"][1]["reference"] == "none" and row(found, 1, "none")["is_reference"]
    assert row(found, 1, "fixed")["verdict"].startswith("fixed λ=0.1 is better than none by 1.4")
    # The same runs as the reference's, judged by another adapter.
    assert "no difference shown" in row(found, 1, "early-stopping")["verdict"]


def test_where_all_runs_of_pi_failed_another_arm_is_the_reference(finished, evidence):
    plan = finished(cost)
    for arm in ("pi", "pi-swept"):
        lose(evidence, arm)
    found = results.report(Plan(plan.protocol, evidence))
    assert found["tasks"][1]["reference"] == "none"
    assert row(found, 1, "pi (")["failed_seeds"] == [0, 1, 2]
    assert row(found, 1, "fixed")["verdict"]


def test_a_difference_that_is_noise_is_called_so(finished):
    # Which of two arms is the better one changes from seed to seed.
    generators = [np.random.default_rng(seed) for seed in range(9)]
    found = results.report(finished(lambda spec: 4.0 + 0.01 * generators[spec.seed].normal()))
    assert "no difference shown" in row(found, 1, "none")["verdict"]


def test_two_seeds_decide_nothing(finished, evidence):
    plan = finished(cost)
    found = results.report(Plan(plan.protocol, evidence, seeds=2))
    none = row(found, 1, "none")
    assert none["difference"]["low"] > 0
    assert none["verdict"] == "two seeds decide nothing between none and pi (S* = 0.2) (+1.4427 bits/token)"
    assert "| two seeds |" in report.markdown(found) and "worse by" not in report.markdown(found)


def test_early_stopping_is_the_same_runs_at_their_best_adapter(finished, evidence):
    plan = finished(cost)
    for record in list(evidence):
        if record["arm"] == "none":
            record["test"]["best"] = [4.1 * 100] * 12
    found = results.report(Plan(plan.protocol, evidence))
    early = row(found, 1, "early-stopping")
    assert early["seeds"] == row(found, 1, "none")["seeds"]
    assert early["test_bpt"]["mean"] == pytest.approx(4.1 / np.log(2))


def test_the_claim_is_shown_where_pi_matches_the_sweep(found):
    claim = found["tasks"][1]["claims"]["pi"]
    assert claim["swept_best"] == "fixed λ=0.1"
    assert claim["excess"]["mean"] == pytest.approx(-0.0005, abs=1e-5)
    assert claim["outcome"] == "shown"
    assert found["claims"]["pi"]["tasks"] == {
        "shown": 1,
        "refuted": 0,
        "open": 0,
        "not run": 0,
    }  # S* was chosen on the other
    assert found["claims"]["pi"]["outcome"] == "shown"
    # What it saves follows from the design and is said as such: two places in this sweep, two rates.
    assert found["cost"]["share"] == 1 / 2 and found["cost"]["with_rates"] == 3 / 4


def test_the_claimants_are_held_against_the_sweep_with_early_stopping_too(finished, evidence):
    """A sweep whose final adapters are worse than PI's, but whose best are better by a tenth."""
    plan = finished(cost)
    for record in list(evidence):
        if record["arm"] == "none":
            record["validation"]["best"] = record["validation"]["final"] - 2
            record["test"]["best"] = [3.6 * 100] * 12
    found = results.report(Plan(plan.protocol, evidence))
    claim = found["tasks"][1]["claims"]["pi"]
    assert claim["stopped_best"] == "early-stopping"
    assert claim["stopped_excess"]["mean"] == pytest.approx(4.0 / 3.6 - 1, abs=1e-4)
    assert claim["outcome"] == "shown"  # the claim itself is about final adapters
    assert found["claims"]["pi"]["stopped_worst_excess"] == pytest.approx(4.0 / 3.6 - 1, abs=1e-3)
    assert "with early stopping the swept best is early-stopping" in " ".join(report.claim_lines(found))


def test_early_stopping_that_lacks_a_seed_has_no_best(finished, evidence):
    """It takes another rate than lambda = 0 does, and at that one only the run that tunes it is finished."""
    plan = finished(cost)
    for record in evidence:
        if record["settings"]["control.controller"] == "none" and record["task"] != "base":
            record["validation"]["best"] -= record["settings"]["optimizer.learning_rate"]
    found = results.report(Plan(plan.protocol, evidence))
    assert row(found, 1, "early-stopping")["seeds"] == [0]
    claim = found["tasks"][1]["claims"]["pi"]
    assert claim["outcome"] == "shown" and claim["seeds"] == [0, 1, 2]
    assert claim["stopped_best"] is None and claim["stopped_excess"] is None


def test_tasks_that_are_not_run_leave_the_claim_open(finished):
    plan = finished(cost)
    found = results.report(Plan(plan.protocol, plan.evidence, tasks=["first"]))
    assert found["claims"]["pi"]["tasks"]["not run"] == 1 and found["claims"]["pi"]["outcome"] == "open"


def test_part_of_the_sweep_decides_nothing(protocol, evidence, finish):
    """One of its places is missing: the best of the others may not be the best."""
    plan = Plan(protocol, evidence)
    while (spec := plan.next()) is not None:
        finish(spec, cost(spec), nats=[cost(spec) * 100] * 3, tokens=[100] * 3)
    for record in list(evidence):
        if record["arm"] == "fixed" and record["task"] == "second" and record["seed"]:
            del evidence.records[record["key"]]
    found = results.report(Plan(protocol, evidence))
    claim = found["tasks"][1]["claims"]["pi"]
    assert claim["seeds"] == [0] and claim["outcome"] == "open" and "1 seed" in claim["statement"]
    assert found["claims"]["pi"]["outcome"] == "open"


@pytest.mark.parametrize(
    ("low", "high", "seeds", "expected"),
    [
        (-0.01, 0.001, 3, "shown"),
        (-0.01, 0.001, 2, "open"),
        (-0.01, 0.003, 3, "open"),
        (0.0021, 0.003, 3, "refuted"),
    ],
)
def test_outcome(low, high, seeds, expected):
    assert outcome(Estimate((low + high) / 2, low, high), seeds) == expected


def test_a_failed_run_of_pi_refutes_the_claim_and_one_of_the_sweep_leaves_it_to_the_others(finished, evidence):
    plan = finished(cost)

    def fail(arm: str, seeds: tuple[int, ...]) -> dict:
        lose(evidence, arm, seeds)
        return results.report(Plan(plan.protocol, evidence))["tasks"][1]["claims"]["pi"]

    claim = fail("fixed", (1, 2))
    assert claim["swept_best"] == "none" and claim["seeds"] == [0, 1, 2]
    claim = fail("pi", (0, 1, 2))
    assert claim["outcome"] == "refuted" and "a run of pi (S* = 0.2) failed" in claim["statement"]


def test_failed_runs_are_counted_and_not_averaged(finished, evidence):
    plan = finished(cost)
    lose(evidence, "fixed", seeds=(1,))
    found = results.report(Plan(plan.protocol, evidence))
    fixed = row(found, 1, "fixed")
    assert fixed["seeds"] == [0, 2] and fixed["failed_seeds"] == [1]
    assert "2 (1 failed)" in report.markdown(found)
    assert found["tasks"][1]["claims"]["pi"]["swept_best"] == "none"  # lambda = 0.1 is cheaper, and loses runs


def test_half_of_the_evidence_makes_a_report_that_says_so(protocol, evidence, finish):
    """S* is chosen on two seeds; the setpoints were tried on one."""
    plan = Plan(protocol, evidence)
    assert results.report(plan)["tasks"] == []
    still_open: set[str] = set()
    while (spec := plan.next(lambda spec: spec.key in still_open)) is not None:
        if spec.arm == "pi-swept" and spec.seed:
            still_open.add(spec.key)
        else:
            finish(spec, cost(spec))
    found = results.report(plan)
    assert found["setpoint"] == 0.2 and found["setpoint_is_provisional"]
    assert "S* = 0.2, chosen by validation on first (provisional: some of the runs" in report.markdown(found)


def test_the_overview_sets_every_arm_against_the_swept_best(found):
    lines = {line["name"]: line for line in found["overview"]}
    # The sweep's best costs 4.002 nats on both tasks, none 5 and PI 4; where PI was swept, it ran on the first alone.
    assert lines["none"]["excess"] == pytest.approx({"first": 5 / 4.002 - 1, "second": 5 / 4.002 - 1}, abs=1e-4)
    assert lines["pi"]["mean"] == pytest.approx(4 / 4.002 - 1, abs=1e-4) == lines["pi"]["worst"]
    assert lines["fixed"]["worst"] == 0
    assert "| none | 1.0 | 1.0 | +24.94 | +24.94 | +24.94 | +24.94 |" in report.markdown(found)


@pytest.mark.parametrize(
    ("name", "runs", "seconds"),
    [("none", 1, 1.0), ("pi", 1, 1.5), ("fixed-at-mean", 2, 3.0), ("replay", 2, 3.0), ("swept λ", 2, 2.5)],
)
def test_an_arm_costs_its_runs_and_those_that_it_takes_lambda_from(found, name, runs, seconds):
    """A run with lambda takes 90 seconds here, and one without 60; both have as many tokens."""
    (line,) = [line for line in found["overview"] if line["name"] == name]
    assert line["cost"] == {"runs": runs, "tokens": runs, "seconds": seconds}


def test_a_sweep_that_lacks_a_setting_has_no_best(finished, evidence, finish):
    plan = finished(cost)
    more = Plan(replace(plan.protocol, arms=(*plan.protocol.arms, FIXED[1])), evidence)
    found = results.report(more)
    assert found["overview"] == [] and set(found["tasks"][1]["swept_excess"].values()) == {None}
    while (spec := more.next()) is not None:
        finish(spec, tokens=[100] * 12)["failed"] = "not finite"
    found = results.report(more)  # with one that lost its runs it is complete
    assert found["tasks"][1]["swept_excess"]["none"] == pytest.approx(5 / 4.002 - 1, abs=1e-4)


def altered(evidence, **changed) -> None:
    """One run more of the first task, as another machine would have left it."""
    record = next(record for record in evidence if record["task"] == "first")
    evidence.add(record | {"key": f"elsewhere {len(evidence.records)}"} | changed, "elsewhere.json")


@pytest.mark.parametrize(
    "changed",
    [{"test": {"tokens": [99] * 12, "final": [1.0] * 12, "best": [1.0] * 12}}, {"text": "other"}],
    ids=["other test documents", "other training text"],
)
def test_runs_of_one_task_on_different_text_are_not_compared(finished, evidence, changed):
    plan = finished(cost)
    for record in evidence:
        record["text"] = "one"
    altered(evidence, text="one")
    results.report(plan)
    altered(evidence, **{"text": "one"} | changed)
    with pytest.raises(UserError, match=r"elsewhere\.json are runs of one task on different text"):
        results.report(plan)


def test_the_report_says_where_the_runs_were_done(finished, evidence):
    plan = finished(cost)
    for number, record in enumerate(evidence):
        record |= {"machine": {"cpu": "a CPU"}, "versions": {"numpy": f"2.{number % 2}"}, "git_revision": number % 3}
    page = report.markdown(results.report(plan))
    runs = len(evidence.records)
    assert (
        f"{runs} runs on a CPU, a thread each, at 3 revisions of the code; numpy 2.0 and 2.1. {runs} of them are"
        in page
    )
    fewer = results.report(Plan(plan.protocol, evidence, seeds=2))
    assert 0 < fewer["runs_of_the_protocol"] < fewer["runs"] == runs
