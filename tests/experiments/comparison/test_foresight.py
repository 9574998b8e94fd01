"""How well S_free is foreseen, on runs whose growth is known."""

from dataclasses import replace

import pytest

from granite_scu.config.settings import OptimizerConfig
from granite_scu.experiments.comparison import report, results
from granite_scu.experiments.comparison.foresight import LAST_TICKS, foresight
from granite_scu.experiments.comparison.plan import Plan
from granite_scu.experiments.comparison.protocol import NONE, STOPPED
from granite_scu.training.learning_rate import cumulated_rates

STEPS = 200


def course(rate: float, power_after_probe: float) -> dict:
    """Ticks of a run whose ParamBPT grows like the square of the summed rates, and like another power after step 60."""
    optimizer = OptimizerConfig(learning_rate=rate, schedule="cosine", warmup_steps=10)
    moved = cumulated_rates(optimizer, STEPS)
    steps = list(range(4, STEPS + 1, 4))
    param = [0.1 * (moved[k] / moved[60]) ** (2 if k <= 60 else power_after_probe) for k in steps]
    return {
        "step": steps,
        "s": [p / (p + 5.0) for p in param],
        "lambda": [0.0] * len(steps),
        "data_bpt": [5.0] * len(steps),
    }


@pytest.fixture
def finished(protocol, evidence, finish):
    """Every run without lambda: as the probe foresees on the first task, and with another growth on the second."""

    def write(power_on_second: float, steps: int = STEPS) -> Plan:
        plan = Plan(replace(protocol, arms=(NONE, STOPPED)), evidence)
        while (spec := plan.next()) is not None:
            record = finish(spec)
            if spec.task.steps:
                rate = spec.settings["optimizer.learning_rate"]
                power = 2.0 if spec.task.name == "first" else power_on_second
                record["settings"] |= {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 10}
                record |= {"steps": steps, "ticks": course(rate, power)}
        return plan

    return write


@pytest.mark.parametrize("power", [2.0, 0.5, 3.5])
def test_growth_that_goes_on_is_foreseen_and_one_that_changes_by_more_than_a_power_leaves_the_interval(finished, power):
    first, second = foresight(finished(power_on_second=power))["tasks"]
    assert first["task"] == "first" and first["runs"] == first["inside"] > 3
    assert first["foreseen"] == pytest.approx(first["came"], abs=1e-6)
    assert first["low"] < first["came"] < first["high"]
    assert second["inside"] == (second["runs"] if power == 2 else 0)
    assert (second["came"] > second["high"]) == (power > 2)


def test_a_run_no_longer_than_a_probe_has_nothing_to_foresee(finished):
    found = foresight(finished(power_on_second=2.0, steps=60))
    assert (found["runs"], found["tasks"]) == (0, [])


def test_what_came_is_not_the_noise_of_one_tick(finished, evidence):
    plan = finished(power_on_second=2.0)
    for record in evidence.records.values():
        if record["steps"] == STEPS:
            ticks = record["ticks"]
            param = ticks["s"][-1] / (1 - ticks["s"][-1]) * 5.0
            ticks["data_bpt"][-1] = 2.5
            ticks["s"][-1] = param / (param + 2.5)
    row = foresight(plan)["tasks"][0]
    odds = row["came"] / (1 - row["came"])
    assert odds == pytest.approx(row["foreseen"] / (1 - row["foreseen"]) * 5.0 / (5.0 - 2.5 / LAST_TICKS))


def test_the_foresight_is_tried_at_several_lengths(finished):
    found = foresight(finished(power_on_second=3.5))
    first, second = found["tasks"]
    assert found["runs"] == first["runs"] + second["runs"]
    inside = {each["share"]: each["inside"] for each in found["shares"]}
    assert inside[0.3] == first["runs"]  # the product's probe, of 60 of 200 steps
    assert inside[0.8] == found["runs"]  # by then the new growth has shown


def test_a_probe_that_foresees_fewer_runs_says_of_how_many(finished, evidence):
    """At most of its first ticks one run has nothing to measure, so that the shortest probe has too few to go by."""
    plan = finished(power_on_second=2.0)
    record = next(record for record in evidence if record["task"] == "first")
    record["ticks"]["s"][:8] = [None] * 8
    found = foresight(plan)
    runs = found["runs"]
    shares = {each["share"]: each for each in found["shares"]}
    assert shares[0.2] == {"share": 0.2, "runs": runs - 1, "inside": runs - 1} and shares[0.4]["runs"] == runs
    shown = report.markdown(results.report(plan))
    assert f"Were the probe a share of the run: {runs - 1} of {runs - 1} (20%), {runs} (30%)" in shown


def test_runs_of_another_protocol_are_not_counted(finished, evidence):
    plan = finished(power_on_second=2.0)
    before = foresight(plan)
    source = next(record for record in evidence if record["task"] == "first")
    evidence.add(source | {"key": "elsewhere", "task": "docs-quick"}, "elsewhere.json")
    assert foresight(plan) == before


@pytest.mark.parametrize("spoilt", [None, 1.0])
def test_ticks_that_say_nothing_are_left_out(finished, evidence, spoilt):
    plan = finished(power_on_second=2.0)
    before = foresight(plan)
    for record in evidence.records.values():
        if record["steps"] == STEPS:
            record["ticks"]["s"][5] = record["ticks"]["s"][20] = spoilt
    after = foresight(plan)
    assert after["runs"] == before["runs"] and after["tasks"][0]["inside"] == after["tasks"][0]["runs"]
    for record in evidence.records.values():
        record["ticks"]["s"] = [spoilt] * len(record["ticks"]["s"])
    assert foresight(plan)["runs"] == 0
