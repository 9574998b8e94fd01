from collections import Counter
from dataclasses import replace

import pytest

from granite_scu.config.errors import UserError
from research.real.command import of_shard
from research.real.grid import (
    ARMS,
    FORMER,
    GROUPS,
    HEADLINES,
    MOST_RATES,
    SMALL,
    STAGES,
    Cell,
    Stage,
    adapter,
    free_rival,
    interior,
    rates,
    scaled_rival,
    settled,
    to_do,
)
from research.real.tasks import TASKS

PLAIN = Cell("tiny-granite-h", "museum", "plain", 0.0, 0.0)
ONE = Stage(("tiny-granite-h",), ("museum",), GROUPS)


def test_each_arm_begins_with_three_rates_around_the_middle_of_its_base():
    assert rates(PLAIN, {}) == [3e-3, 1e-2, 1e-3]
    assert rates(replace(PLAIN, base="smollm2"), {}) == [1e-3, 3e-3, 3e-4]


@pytest.mark.parametrize(("best", "tried"), [(3e-3, 3), (1e-2, 4), (1e-4, 6), (1e-9, MOST_RATES)])
def test_rates_widen_until_the_best_lies_inside_or_there_are_no_more(best, tried, run_all):
    finished = run_all(ONE._replace(groups=GROUPS[:1]), lambda cell: {"best": best})
    assert len({cell.rate for cell in finished if cell.arm == "plain"}) == tried
    assert settled(PLAIN, finished)["ema"] == max(best, 1e-6)
    assert interior(PLAIN, finished, "ema") == (best > 1e-6)


def test_a_run_that_diverged_is_no_best_one(run_all, line):
    finished = run_all(ONE._replace(groups=GROUPS[:1]))
    del finished[replace(PLAIN, rate=1e-2)]["points"]
    assert settled(PLAIN, finished)["best"] != 1e-2


def test_every_arm_and_value_is_run_and_headlines_and_the_best_kl_have_five_seeds(run_all):
    finished = run_all(ONE, lambda cell: {"validation": 1 + abs(cell.value - 1.0) / 100} if cell.rate == 1e-2 else {})
    seeds = Counter((cell.arm, cell.value) for cell in finished if cell.seed)
    assert {(cell.arm, cell.value) for cell in finished} == {
        (arm, value) for arm, values in ARMS.items() for value in values if arm not in (*FORMER, "held")
    }
    of_f = ("replay", 0.05)  # it validates best of what is free
    assert set(seeds) == {*HEADLINES, ("kl", 1.0), of_f} and set(seeds.values()) == {4}


def test_on_smollm2_the_amendments_are_run_in_their_order(run_all):
    two = Stage(("smollm2",), ("museum", "buses"), ())
    finished = run_all(two, lambda cell: {"validation": cell.rate})
    of = Counter((cell.task, cell.arm, cell.rate) for cell in finished)
    assert of == {("museum", "drift", 3e-3): 4, ("museum", "held", 1e-3): 5, ("museum", "held", 3e-3): 1,
                  ("buses", "drift", 1.3e-3): 2, ("buses", "drift", 2.6e-3): 2}  # fmt: skip
    assert [cell.arm for cell in finished] == ["drift"] * 4 + ["held"] * 6 + ["drift"] * 4


def test_the_value_of_kl_that_has_seeds_is_the_best_on_all_tasks(run_all):
    two = ONE._replace(tasks=("museum", "graphs"), groups=[[("kl", 1.0), ("kl", 10.0)]])
    bits = {("museum", 1.0): 1.0, ("museum", 10.0): 1.1, ("graphs", 1.0): 2.0, ("graphs", 10.0): 1.5}
    finished = run_all(two, lambda cell: {"validation": bits[cell.task, cell.value]})
    assert {(cell.task, cell.value) for cell in finished if cell.seed} == {("museum", 10.0), ("graphs", 10.0)}
    bases = two._replace(bases=SMALL[:2], tasks=("museum",))  # the first prefers 1, both together 10
    finished = run_all(
        bases, lambda cell: {"validation": bits["museum" if cell.base == SMALL[0] else "graphs", cell.value]}
    )
    assert {(cell.base, cell.value) for cell in finished if cell.seed} == {(base, 10.0) for base in SMALL[:2]}


def test_the_strongest_free_rival_validates_no_worse_and_drifts_least(run_all):
    finished = run_all(ONE)
    loop, early = replace(PLAIN, arm="drift", value=0.02), replace(PLAIN, rate=3e-3)
    points = finished[early]["points"]
    points["step 9"] = points["step 9"] | {"validation": 0.9, "drift": 0.01}
    points["x 0.5"] = points["x 0.5"] | {"validation": 1.1, "drift": 0.001}  # learned less than the loop
    assert free_rival(loop, finished) == (early, "step 9")
    assert replace(early, seed=3) in list(to_do(ONE, finished))


def test_the_scaled_rival_validates_as_the_loop_does_at_the_least_drift(run_all):
    finished = run_all(ONE._replace(groups=GROUPS[:1]))
    loop, early = replace(PLAIN, arm="drift", value=0.02), replace(PLAIN, rate=3e-3)
    points = finished[early]["points"]  # the loop validates at 1.0, as all of plain's at 0.01 with a drift of 0.1
    points["x 0.25"] = points["end"] | {"validation": 1.4, "drift": 0.02, "nats": {"test": [200.0] * 12}}
    points["x 0.5"] = points["end"] | {"validation": 0.9, "drift": 0.06, "nats": {"test": [150.0] * 12}}
    cell, point = scaled_rival(loop, finished)
    found = adapter(finished[cell], point)
    assert cell == early and float(point.removeprefix("x ")) == pytest.approx(0.45)
    assert [found["validation"], found["drift"]] == pytest.approx([1.0, 0.052])
    assert found["nats"]["test"] == pytest.approx([160.0] * 12)
    finished[replace(PLAIN, rate=1e-2)]["points"]["x 0.5"] = points["end"] | {"validation": 0.8, "drift": 0.05}
    assert early.rate not in settled(PLAIN, finished).values() and free_rival(loop, finished)[0] != early
    assert replace(early, seed=3) in list(to_do(ONE, finished))


def test_the_tasks_take_turns_and_the_shards_share_them():
    firsts = [cell.task for cell in to_do(STAGES["A"], {}) if cell.arm == "plain" and cell.base == SMALL[0]]
    assert firsts[::3] == list(TASKS)
    shards = [of_shard(STAGES["A"], f"{number}/3") for number in (1, 2, 3)]
    assert sorted(sum(shards, ())) == sorted(TASKS) and len(shards[0]) == 4
    with pytest.raises(UserError, match="--shard 0/3"):
        of_shard(STAGES["A"], "0/3")


def test_the_budget_of_stage_b_is_five_tasks_and_two_groups():
    assert [len(TASKS), len(STAGES["B"].tasks), len(STAGES["B"].groups)] == [10, 5, 2]
    assert {TASKS[name].kind for name in STAGES["B"].tasks} == {task.kind for task in TASKS.values()}
