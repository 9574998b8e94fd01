"""Which quantity transfers, on sweeps whose truth is known."""

from dataclasses import replace

import pytest

from research.comparison.plan import Cell, Plan
from research.comparison.protocol import FIXED, NONE, NONE_AT_RATE
from research.comparison.transfer import (
    CARRIED,
    CONSTANTS,
    PRIORS,
    QUANTITIES,
    THEORY,
    constants,
    priors,
    transfer,
)

REACH = {"first": 10.0, "second": 100.0}
"""How strongly lambda acts on each task: what is best at 0.1 on the first is best at 0.01 on the second."""


@pytest.fixture
def swept(protocol, evidence, finish):
    """A sweep of both tasks, in which the cost hangs on S alone and is least at S = 50 %."""
    plan = Plan(replace(protocol, arms=(NONE, NONE_AT_RATE, *FIXED)), evidence)
    while (spec := plan.next()) is not None:
        s = 0.9 / (1 + 0.8 * REACH.get(spec.task.name, 0.0) * spec.settings.get("control.lambda_init", 0.0))
        record = finish(spec, validation=4 + (s - 0.5) ** 2 if spec.task.steps else 5.0)
        record["ticks"] |= {"s": [s, s], "data_bpt": [4.5, 3.0]}
    return plan


def test_what_the_cost_hangs_on_transfers_and_lambda_does_not(swept):
    *rows, by_theory = transfer(swept)
    found = {row["quantity"]: row for row in rows}
    assert set(found) == set(QUANTITIES)
    assert (by_theory["quantity"], by_theory["value"]) == THEORY and set(by_theory["excess"]) == {"first", "second"}
    assert found["S"]["value"] == pytest.approx(0.5, abs=1e-6)
    assert found["S"]["excess"]["second"] == pytest.approx(0, abs=1e-6)
    # At lambda = 0.1 the second task is left with S = 0.9 / 9.
    at_best, at_that_lambda = 4 + 0.0, 4 + (0.1 - 0.5) ** 2
    assert found["λ"]["excess"]["second"] == pytest.approx(at_that_lambda / at_best - 1, rel=1e-3)
    assert found["λ"]["best"]["second"] == 0.01


def test_a_value_is_chosen_on_the_other_corpora_too(swept):
    found = {row["quantity"]: row for row in transfer(swept)}
    for name in ("S", "λ"):
        assert set(found[name]["of_other_corpora"]) == {"stdlib-docs", "stdlib-source"}
    # Each task is the only one of its corpus: what is chosen for the first is what is best on the second.
    assert found["λ"]["of_other_corpora"]["stdlib-docs"] == found["λ"]["best"]["second"] == 0.01
    assert found["λ"]["carried_excess"]["second"] == found["λ"]["excess"]["second"] > 0.01
    assert found["S"]["carried_excess"] == pytest.approx({"first": 0, "second": 0}, abs=1e-6)


def test_one_value_for_everything_has_its_cost_on_every_task(swept):
    found = {(row["quantity"], row["value"]): row for row in constants(swept)}
    assert set(found) == {(name, value) for name, values in CONSTANTS.items() for value in values}
    at_two_percent = (4 + (0.1 - 0.5) ** 2) / 4 - 1  # S ends at 0.1 under the largest lambda of the first task
    assert found["S", 0.02]["excess"]["first"] == pytest.approx(at_two_percent, rel=1e-3)
    assert found["S", 0.02]["excess"]["second"] == pytest.approx((4 + (0.9 / 81 - 0.5) ** 2) / 4 - 1, rel=0.05)
    assert found["λ", 0.1]["excess"]["first"] == pytest.approx(0, abs=1e-6)


def test_another_sigma_moves_lambda_by_its_square_and_what_s_comes_to(swept):
    found = {(row["quantity"], row["times"]): row for row in priors(swept)}
    assert set(found) == {(name, factor) for name, _ in CARRIED for factor in PRIORS}
    ours = {row["quantity"]: row for row in constants(swept) if (row["quantity"], row["value"]) in CARRIED}
    assert all(found[name, 1.0]["mean_excess"] == pytest.approx(row["mean_excess"]) for name, row in ours.items())
    # With half of sigma lambda = 0.03 does what 0.12 did, which lies a tenth of the way from 0.1 to 0.3.
    s = [0.9 / (1 + 8 * lam) for lam in (0.1, 0.3, 1.0)]
    cost = [(4 + (value - 0.5) ** 2) / 4 - 1 for value in s]
    assert found["λ", 0.5]["excess"]["first"] == pytest.approx(0.9 * cost[0] + 0.1 * cost[1], rel=1e-3)
    # ParamBPT counts four times there, so that an S of 0.45 lies between the runs that ended at 0.26 and 0.1.
    there = [4 * value / (1 + 3 * value) for value in s]
    share = (there[1] - 0.45) / (there[1] - there[2])
    expected = (1 - share) * cost[1] + share * cost[2]
    assert 0 < share < 1 and found["S", 0.5]["excess"]["first"] == pytest.approx(expected, rel=1e-3)


def test_one_corpus_leaves_nothing_to_carry_over(swept):
    tasks = swept.protocol.tasks
    alike = replace(swept.protocol, tasks=(tasks[0], replace(tasks[1], corpus=tasks[0].corpus)))
    one = Plan(alike, swept.evidence)
    while (spec := one.next()) is not None:
        source = next(r for r in swept.evidence if r["task"] == spec.task.name and r["seed"] == spec.seed)
        swept.evidence.add(source | {"key": spec.key, "settings": spec.settings}, "here")
    assert all(row["carried_excess"] == {} for row in transfer(one))


def test_values_between_the_settings_are_interpolated_and_beyond_them_the_end_counts(swept, protocol):
    for seed in swept.seeds:
        record = swept.record(Cell(protocol.tasks[0], FIXED[2], seed))
        record["ticks"]["s"] = [0.95, 0.95]
    found = {row["quantity"]: row for row in transfer(swept)[:-1]}
    assert found["S"]["excess"]["second"] == pytest.approx((4 + 0.4**2) / 4 - 1, rel=1e-3)  # lambda = 0, S = 0.9


def test_ticks_without_s_are_left_out_and_seeds_that_had_no_other(swept, protocol):
    before = transfer(swept)
    first = [swept.record(Cell(protocol.tasks[0], FIXED[0], seed)) for seed in swept.seeds]
    for record in first:
        record["ticks"] |= {"s": [*record["ticks"]["s"], None], "data_bpt": [*record["ticks"]["data_bpt"], None]}
    assert transfer(swept) == before
    for record in first[1:]:
        record["ticks"]["s"] = [None] * 3
    after = [row["mean_excess"] for row in transfer(swept)]  # of the seed that is left, whose runs are as the others'
    assert after == pytest.approx([row["mean_excess"] for row in before])
    first[0]["ticks"]["s"] = [1.0] * 3  # what rounds to it says nothing of ParamBPT
    assert transfer(swept) == []
    assert {task for row in constants(swept) for task in row["excess"]} == {"second"}


def test_a_task_without_a_whole_sweep_is_left_out(protocol, evidence):
    assert transfer(Plan(protocol, evidence)) == []
    assert constants(Plan(protocol, evidence)) == []
    assert priors(Plan(protocol, evidence)) == []
