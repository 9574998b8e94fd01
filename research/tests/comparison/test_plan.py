"""What is run when, on evidence that no run has left."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from granite_scu.config.request import Request
from granite_scu.config.settings import intervals_of
from granite_scu.training.controller import check_stops, law_of_length
from research.comparison import data as data_module
from research.comparison import evidence as evidence_module
from research.comparison.evidence import Evidence, Spec, precision_of
from research.comparison.plan import Cell, Plan, mean_strength
from research.comparison.protocol import (
    FIXED,
    FRESH,
    FRESH_AGAIN,
    FRESH_THIRD,
    FULL,
    NONE,
    PI,
    PRECISION,
    QUICK,
    SCARCE,
    STOPPED,
    VARIED,
    Arm,
    Protocol,
)
from research.comparison.runs import dotted_settings
from research.laws import LAWS
from research.laws.auto import AutoSetpoint
from research.run_store import write_record

ROOT = Path(__file__).parents[3]


def called(protocol: Protocol, name: str) -> Arm:
    return next(arm for arm in protocol.arms if arm.name == name)


def drain(plan: Plan, finish, limit: int = 1000, **results) -> list[Spec]:
    """Do every run in the plan's order, one at a time."""
    done = []
    while (spec := plan.next()) is not None:
        finish(spec, **results)
        done.append(spec)
        assert len(done) < limit
    return done


def test_every_cell_ends_with_a_run_and_no_run_is_done_twice(protocol, evidence, finish):
    plan = Plan(protocol, evidence)
    done = drain(plan, finish)
    assert len({spec.key for spec in done}) == len(done)
    assert all(plan.record(cell) for cell in plan.everything())


def test_the_rate_of_a_family_is_that_of_its_best_validation(protocol, evidence, finish):
    plan = Plan(protocol, evidence)
    task = protocol.tasks[0]
    for rate, validation in ((1e-3, 6.0), (2e-3, 5.9)):
        finish(plan.spec(Cell(task, NONE, 0, rate)), validation)
    assert plan.learning_rate(task, NONE) == 2e-3
    # The tuning run at the winning rate is the arm's own run on that seed.
    assert plan.record(Cell(task, NONE, 0)) is not None
    assert plan.record(Cell(task, NONE, 1)) is None


def test_a_rate_is_tuned_for_the_adapter_that_counts(protocol, evidence, finish):
    plan = Plan(protocol, evidence)
    for rate, final, best in ((1e-3, 6.0, 5.8), (2e-3, 6.5, 5.7)):
        record = finish(plan.spec(Cell(protocol.tasks[0], NONE, 0, rate)), final)
        record["validation"]["best"] = best
    assert plan.learning_rate(protocol.tasks[0], NONE) == 1e-3
    assert plan.learning_rate(protocol.tasks[0], STOPPED) == 2e-3


def test_what_a_task_sets_otherwise_is_in_its_runs_and_makes_them_others(protocol, evidence):
    plain, one = protocol.tasks[0], replace(protocol, rates=(1e-3,))
    settings = {"lora.rank": 2, "optimizer.learning_rate": 5e-4}
    varied = replace(plain, name="varied", settings=settings)
    plan = Plan(replace(one, tasks=(plain, varied)), evidence)
    as_usual, otherwise = (plan.spec(Cell(task, FIXED[2], 0)) for task in (plain, varied))
    assert otherwise.settings == as_usual.settings | settings and otherwise.key != as_usual.key
    assert plan.base(varied).settings.items() >= settings.items()
    assert plan.spec(Cell(replace(plain, settings={}), FIXED[2], 0)).key == as_usual.key


def test_the_varied_tasks_differ_from_those_of_the_full_protocol_in_one_thing_each(evidence):
    plan = Plan(VARIED, evidence)
    for task in VARIED.tasks:
        original = FULL.task("-".join(task.name.split("-")[:2]))
        assert replace(task, name=original.name, settings={}) == original
        spec = plan.spec(Cell(task, FIXED[0], 0))
        asked = dotted_settings(spec, spec.settings, Path("run"))
        assert asked.items() >= task.settings.items()
        assert asked["control.lambda_init"] == FIXED[0].settings["control.lambda_init"]


def test_the_setpoint_is_chosen_by_validation_on_one_task(protocol, evidence, finish):
    plan = Plan(protocol, evidence)
    while (spec := plan.next()) is not None:
        first, at_02 = spec.task.name == "first", spec.settings.get("control.target_s") == 0.2
        finish(spec, validation=5.0 if first == at_02 else 6.0)  # the other one is better on the second task
    assert plan.setpoint() == 0.2
    assert plan.spec(Cell(protocol.tasks[1], PI, 0)).settings["control.target_s"] == 0.2


def test_the_average_is_of_the_same_seed_and_the_replay_of_another(protocol, evidence, finish):
    plan = Plan(protocol, evidence)
    drain(plan, finish)
    task = protocol.tasks[1]
    own, other = (plan.record(Cell(task, PI, seed)) for seed in (0, 1))
    mean, replay = (plan.spec(Cell(task, called(protocol, name), 0)) for name in ("fixed-at-mean", "replay"))
    assert mean.settings["control.lambda_init"] == mean_strength(own)
    assert replay.settings["control.replay"] == other["key"]


def test_p_and_i_start_where_pi_starts_and_original_within_its_own_bounds(protocol, evidence, finish):
    plan = Plan(protocol, evidence)
    drain(plan, finish)
    p, i, original = (plan.spec(Cell(protocol.tasks[1], called(protocol, name), 0)) for name in ("p", "i", "original"))
    start = LAWS["pi"](setpoint=plan.setpoint()).lambda_start
    assert p.settings["control.lambda_init"] == i.settings["control.lambda_init"] == pytest.approx(start, rel=1e-3)
    published = LAWS["original"]()
    assert original.law["lambda_min"] == published.lambda_min and original.law["lambda_max"] == published.lambda_max


def test_mean_strength_weighs_each_lambda_by_the_steps_it_held_for():
    # 0.5 for four steps, 0.2 for six; the last value acts on no step.
    record = {"law": {"lambda_init": 0.5}, "ticks": {"step": [4, 10], "lambda": [0.2, 9.0]}}
    assert mean_strength(record) == pytest.approx(0.32)


def test_what_an_arm_hangs_on_is_run_although_it_was_not_asked_for(protocol, evidence, finish):
    plan = Plan(protocol, evidence, tasks=["second"], arms=["replay"], seeds=1)
    done = drain(plan, finish)
    assert {spec.arm for spec in done} >= {"pi-swept", "pi", "replay"}
    assert "none" not in {spec.arm for spec in done if spec.task.steps}
    assert done[-1].arm == "replay"


def test_the_headline_comes_first_and_the_tasks_in_turn(protocol, evidence):
    cells = Plan(protocol, evidence, seeds=2).cells()
    headline = [cell.arm.name in protocol.headline for cell in cells]
    assert headline == sorted(headline, reverse=True)
    assert [cell.task.name for cell in cells[:4]] == ["first", "second"] * 2


def test_a_failed_run_is_finished_and_never_the_best(protocol, evidence, finish):
    plan = Plan(protocol, evidence)
    task = protocol.tasks[0]
    diverged, good = (plan.spec(Cell(task, NONE, 0, rate)) for rate in protocol.rates)
    scores = ("validation", "test", "law", "ticks", "n_tokens")
    lost = {name: value for name, value in finish(diverged).items() if name not in scores}
    del evidence.records[diverged.key]
    evidence.add({**lost, "failed": "not finite"}, "here")
    finish(good, validation=5.9)
    assert plan.next().key not in (diverged.key, good.key)
    assert plan.learning_rate(task, NONE) == 2e-3


def test_the_key_hangs_on_what_is_trained():
    spec = Spec(FULL.tasks[0], "fixed", "λ=0.1", 3, {**FIXED[2].settings, "optimizer.learning_rate": 1e-3})
    assert replace(spec, arm="x", setting="y").key == spec.key  # these are names only
    others = [
        Spec(FULL.tasks[1], "fixed", "λ=0.1", 3, spec.settings),
        Spec(FULL.tasks[0], "fixed", "λ=0.1", 4, spec.settings),
        Spec(FULL.tasks[0], "fixed", "λ=0.1", 3, {**spec.settings, "control.lambda_init": 0.2}),
    ]
    assert len({spec.key, *(other.key for other in others)}) == 4


def test_the_key_hangs_on_the_laws_defaults(monkeypatch):
    from research.laws import LAWS

    spec = Spec(FULL.tasks[0], "pi", "", 0, {**PI.settings, "optimizer.learning_rate": 1e-3})
    before = replace(spec).key

    @dataclass(frozen=True)
    class Retuned(LAWS["pi"]):
        kp: float = 123.0

    monkeypatch.setitem(LAWS, "pi", Retuned)
    assert replace(spec).key != before


def test_every_run_in_the_repository_has_the_key_that_its_settings_give():
    """Whatever else a key comes to hang on: these runs are not done again."""
    evidence = Evidence(ROOT / "research" / "evidence" / "comparison" / "runs")
    plan = Plan(FULL, evidence)
    assert len(evidence.records) > 500 and {precision_of(record) for record in evidence} == {PRECISION}
    for record in evidence:
        if record["task"] == "base":
            spec = plan.base(FULL.task(record["arm"]))
        else:
            settings = {name: value for name, value in record["settings"].items() if name != "trainer.precision"}
            spec = Spec(FULL.task(record["task"]), record["arm"], "", record["seed"], settings)
        assert spec.key == record["key"]


def test_another_precision_is_another_run():
    spec = Spec(FULL.tasks[0], "none", "", 0, {**NONE.settings, "optimizer.learning_rate": 1e-3})
    assert (
        replace(spec, precision=PRECISION).key == spec.key == "e44a12a054e3" != replace(spec, precision="32-true").key
    )


def test_a_comparison_is_of_one_precision(protocol, evidence, finish):
    """That of the runs there, where none is asked for."""
    published = drain(Plan(protocol, evidence), finish)
    plan = Plan(protocol, Evidence(evidence.folder, "32-true"))
    for spec in (other := [plan.next() for _ in range(1)]):
        finish(replace(spec, settings={**spec.settings, "trainer.precision": spec.precision}))["key"] = spec.key
    for record in evidence:
        write_record(evidence.folder / f"{record['key']}.json", record)
    found, apart = Evidence(evidence.folder), Evidence(evidence.folder, "32-true")
    assert (found.precision, apart.records.keys()) == (PRECISION, {spec.key for spec in other})
    assert not found.records.keys() & apart.records.keys()
    assert Plan(protocol, found).next() is None and Plan(protocol, apart).next().precision == "32-true"
    for spec in published:
        (evidence.folder / f"{spec.key}.json").unlink()
    assert Evidence(evidence.folder).precision == "32-true"


def test_a_setpoint_found_by_another_rule_is_another_run(protocol, monkeypatch):
    def key(setpoint: float | str) -> str:
        settings = {"control.controller": "pi", "control.target_s": setpoint}
        return Spec(protocol.tasks[0], "pi", "", 0, settings).key

    auto, given = key("auto"), key(0.3)
    monkeypatch.setattr(evidence_module, "AutoSetpoint", lambda: AutoSetpoint(rate=0.123))
    assert key("auto") != auto and key(0.3) == given


@pytest.mark.parametrize(
    "of", [QUICK, VARIED, FRESH, FRESH_AGAIN, FRESH_THIRD, SCARCE, FULL], ids=lambda protocol: protocol.name
)
def test_no_run_of_a_protocol_is_refused_by_its_arms_own_checks(of, evidence, finish, tmp_path, monkeypatch):
    """Every arm on every task, as far as a run checks it before it reads the text; what is replayed is left out."""
    monkeypatch.setattr(data_module, "TEXTS", tmp_path)
    for task in (*FRESH.tasks, *FRESH_AGAIN.tasks, *FRESH_THIRD.tasks):
        (tmp_path / f"{task.corpus}.jsonl").touch()
    plan, checked = Plan(of, evidence, seeds=1), set()
    while ready := [spec for spec in plan.specs() if spec and evidence.get(spec) is None]:
        for spec in ready:
            finish(spec)
            kind = (spec.arm, spec.setting, spec.task.steps)
            if spec.task.steps and "control.replay" not in spec.settings and kind not in checked:
                request = Request.from_dotted(dotted_settings(spec, spec.settings, tmp_path))
                every = intervals_of(request.run, spec.task.steps).validation
                law_of_length(request.control, spec.task.steps, every)
                check_stops(request.run, request.control.every, spec.task.steps, every)
                checked.add(kind)
    assert {arm for arm, *_ in checked} >= {"none", "fixed"}


def test_each_round_is_on_text_that_no_earlier_one_had():
    rounds = [{task.corpus for task in of.tasks} for of in (FULL, FRESH, FRESH_AGAIN, FRESH_THIRD)]
    assert len(set().union(*rounds)) == sum(map(len, rounds))
    assert FRESH_THIRD.judged and FRESH_THIRD.judged not in FRESH_THIRD.formed_on_all


def test_an_arm_without_its_runs_is_named(evidence, finish):
    plan = Plan(QUICK, evidence)
    while (spec := plan.next(lambda spec: spec.arm == "cascade")) is not None:
        finish(spec)
    assert plan.unfinished_arms() == [("docs-quick", "cascade", 3)]
