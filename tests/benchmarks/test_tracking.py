import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import tracking
from benchmarks.tracking import EVERY, STEPS, Cell, grid, measure, meets_goals, quick, summarise
from granite_scu import guard
from granite_scu.comparison import evidence
from granite_scu.control import TRACKING, build
from granite_scu.errors import Diverged, RunFailed, UserError

ROOT = Path(__file__).parents[2]
CELL = Cell(0.1, 1e-3, 16, "stdlib-docs", 0)


def history(ratio, target: float = 0.1) -> list[dict]:
    """A run whose raw S is ``ratio(step)`` times the setpoint. The law's own filter shows nothing of it."""
    return [
        {"step": step, "s": target * ratio(step), "s_ema": target, "s_target": target,
         "lambda": 1.0, "saturated": False, "held": False}
        for step in range(EVERY, STEPS + 1, EVERY)
    ]  # fmt: skip


def result(cell: Cell, ratio) -> dict:
    records = history(ratio)
    figures = measure(cell, records)
    return {"cell": vars(cell), "failed": None, **figures, "trajectory": tracking._trajectory(records)}


def call(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "benchmarks/tracking.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_run_is_measured_by_hand_arithmetic():
    """Up to 1.2 at a tenth of the run, in band from a fifth on, but for one tick in the second half."""

    def ratio(step: int) -> float:
        if step <= STEPS // 10:
            return min(1.2, 2.4 * step / (STEPS // 10))
        return 1.15 if step < STEPS // 5 else 0.7 if step == STEPS // 2 else 1.0

    figures = measure(CELL, history(ratio))
    counted = STEPS * 4 // 5 // EVERY + 1 - 10  # the ten ticks that qualify are not
    assert figures["settling"] == 0.2
    assert figures["in_band"] == pytest.approx(1 - 1 / counted)  # 0.7 is smoothed to 0.84, and the next to 0.91
    assert figures["in_band_early"] == pytest.approx(1 - 1 / (counted - STEPS // 5 // EVERY))
    assert figures["overshoot"] == pytest.approx(0.2, abs=2e-3)
    assert figures["raw"] == pytest.approx(0.03)  # ten ticks with the odd one among them have a mean of 0.97
    assert not meets_goals({**figures, "cell": vars(CELL)})


def test_what_the_actuator_does_is_measured():
    """S a factor e too low throughout, while lambda goes up and down by as much."""
    records = history(lambda step: math.exp(-1))
    for count, record in enumerate(records):
        record |= {"lambda": math.exp(count % 2), "saturated": count % 4 == 0}
    figures = measure(CELL, records)
    assert figures["iae"] == pytest.approx(1)
    assert figures["travel"] == pytest.approx(len(records) - 1)
    assert figures["saturated"] == 0.25
    assert figures["rise"] is None
    disturbed = measure(replace(CELL, disturbance="corpus switched"), records)
    assert [disturbed[name] for name in ("iae", "travel", "saturated")] == [
        figures[name] for name in ("iae", "travel", "saturated")
    ]


def test_the_rise_is_that_of_the_smoothed_s():
    figures = measure(CELL, history(lambda step: 0.5 if step <= 10 * EVERY else 1.0))
    assert figures["rise"] == 13 * EVERY / STEPS  # 0.71, 0.84, 0.92


def test_every_law_is_judged_by_the_same_filter():
    """The defaults', whatever the run's own made of S: here nothing, a flat line, or none."""

    def ratio(step: int) -> float:
        return 1 + 0.5 * math.sin(step / 30)

    figures = measure(CELL, history(ratio))
    assert figures["overshoot"] > 0.3
    for own in (0.01, 0.1, None):
        assert measure(CELL, [{**record, "s_ema": own} for record in history(ratio)]) == figures


def test_stored_runs_of_the_default_law_keep_their_figures():
    """Those were measured by the law's own filter, which is the one that now judges all."""
    compared = 0
    for path in (ROOT / "docs" / "evidence" / "tracking").glob("*.json"):
        stored = json.loads(path.read_text())
        cell = Cell.of(stored)
        if cell.controller == "pi":
            found = tracking.read_run(path, cell)
            assert [found[name] for name in ("settling", "in_band", "recovery")] == [
                stored[name] for name in ("settling", "in_band", "recovery")
            ]
            for name in {"overshoot", "raw", *tracking.EXCURSION} & stored.keys():
                assert found[name] == pytest.approx(stored[name], abs=1e-3)
            compared += 1
    assert compared > 50


def test_a_held_tick_is_out_of_band_and_otherwise_passed_over():
    records = history(lambda step: 1.0)
    records[50] |= {"s": None, "held": True}
    figures = measure(CELL, records)
    counted = len(records) - 10
    assert figures["in_band"] == pytest.approx(1 - 1 / counted)
    assert figures["raw"] == pytest.approx(0.0, abs=1e-9) and figures["overshoot"] == pytest.approx(0.0, abs=1e-9)
    assert meets_goals(figures)
    for record in records[30:]:
        record["s"] = None
    assert not meets_goals(measure(CELL, records))
    for cell in (CELL, replace(CELL, disturbance="corpus switched")):
        nothing = measure(cell, [{**record, "s": None, "s_ema": None} for record in records])
        assert not meets_goals(nothing) and nothing["iae"] is None


def test_passing_through_the_band_is_not_settling():
    figures = measure(CELL, history(lambda step: 1 + 0.5 * math.sin(step / 30)))
    assert figures["settling"] is None
    assert not meets_goals(figures)


def test_a_disturbance_is_judged_by_the_way_back():
    disturbed = replace(CELL, disturbance="learning rate x3")
    back = STEPS // 2 + 5 * EVERY
    figures = measure(disturbed, history(lambda step: 1.4 if STEPS // 2 < step < back else 1.0))
    assert figures["recovery"] == pytest.approx(6 * EVERY / STEPS)  # the smoothed S is back a tick later
    assert figures["overshoot"] == pytest.approx(0.0, abs=1e-9)  # of the half before it
    assert meets_goals(figures)
    lost = measure(disturbed, history(lambda step: 1.5 if step > STEPS // 2 else 1.0))
    assert lost["recovery"] == 1.0
    assert not meets_goals(lost)


def pushed(step: int) -> float:
    """Up to 1.2 in the first half; in the second up to 1.3, down to 0.6 and back."""
    if step <= STEPS // 2:
        return 1.2 if 0 < step - STEPS // 4 <= 10 * EVERY else 1.0
    ticks = (step - STEPS // 2) / EVERY
    return 1.3 if ticks <= 10 else 0.6 if ticks <= 20 else 1.0


@pytest.mark.parametrize(
    ("disturbance", "peak", "dip"),
    [
        ("learning rate x3", 0.3, -0.4),
        ("corpus switched", 0.3, -0.4),
        ("S* x1.5", 0.3, None),  # begins below the new setpoint, wherever it goes from there
        ("S* /1.5", None, -0.4),
        (None, None, None),
    ],
)
def test_how_far_a_disturbance_pushes_s_is_measured_after_it(disturbance, peak, dip):
    figures = measure(replace(CELL, disturbance=disturbance), history(pushed))
    assert (figures["peak"], figures["dip"]) == (pytest.approx(peak, abs=2e-3), pytest.approx(dip, abs=2e-3))
    assert figures["overshoot"] == pytest.approx(0.2 if disturbance else 0.3, abs=2e-3)


def test_a_run_that_is_pushed_one_way_only_has_no_excursion_the_other_way():
    figures = measure(replace(CELL, disturbance="corpus switched"), history(lambda step: 0.99))
    assert (figures["peak"], figures["dip"]) == (0.0, pytest.approx(-0.01))


def test_the_excursion_is_of_the_setpoint_in_force():
    moved = replace(CELL, disturbance="S* x1.5")
    records = history(lambda step: 1.0 if step <= STEPS // 2 else 1.6)
    later = [{**record, "s_target": 0.15} if record["step"] > STEPS // 2 else record for record in records]
    assert measure(moved, later)["peak"] == pytest.approx(0.16 / 0.15 - 1)


def test_the_summary_is_the_worst_of_each():
    good, bad = result(CELL, lambda step: 1.0), result(replace(CELL, seed=1), lambda step: 0.5)
    facts = summarise([good, bad], 2)
    assert facts["worst_in_band"] == facts["worst_in_band_early"] == 0.0
    assert facts["worst_settling"] == facts["worst_rise"] == 1.0
    assert facts["worst_iae"] == pytest.approx(math.log(2))
    assert facts["goal_met"] is False
    assert facts["missed"] == [str(replace(CELL, seed=1))]
    assert summarise([good], 1)["goal_met"] is True
    assert facts["worst_peak"] is None and facts["worst_dip"] is None
    disturbed = result(replace(CELL, disturbance="corpus switched"), pushed)
    facts = summarise([good, {**disturbed, "travel": 7.0, "saturated": 0.5}], 2)
    assert (facts["worst_peak"], facts["worst_dip"]) == (pytest.approx(0.3, abs=2e-3), pytest.approx(-0.4, abs=2e-3))
    assert (facts["worst_travel"], facts["worst_saturated"]) == (7.0, 0.5)


def test_of_a_part_of_the_grid_it_is_not_said_that_the_goal_is_met():
    good, bad = result(CELL, lambda step: 1.0), result(replace(CELL, seed=1), lambda step: 0.5)
    part = summarise([good], 3)
    assert (part["cells"], part["of"], part["complete"], part["goal_met"]) == (1, 3, False, None)
    assert summarise([good, bad], 3)["goal_met"] is False
    assert summarise([good], 1)["complete"]


def test_the_grid_has_every_combination_once_and_its_first_half_is_balanced():
    setpoints, corpora = list(tracking.SETPOINTS), list(tracking.CORPORA)
    cells = grid(setpoints, corpora, 3, "pi", [])
    assert len(set(cells)) == len(cells)
    plain = [cell for cell in cells if not cell.disturbance]
    assert len(plain) == 3 * 4 * 2 * 2 * 2
    assert max(setpoints) / min(setpoints) > 100 and tracking.RATES[1] / tracking.RATES[0] == pytest.approx(3)
    assert {cell.disturbance for cell in cells} == {None, *tracking.DISTURBANCES}
    first = cells[: len(plain) // 6]
    for pair in ("learning_rate", "rank"), ("rank", "corpus"), ("learning_rate", "corpus"):
        counts = [tuple(getattr(cell, name) for name in pair) for cell in first]
        assert {counts.count(seen) for seen in counts} == {4}
    few = quick(setpoints, corpora, "pi", [])
    assert {cell.setpoint for cell in few} == set(setpoints)
    assert {cell.rank for cell in few} == set(tracking.RANKS) and {cell.corpus for cell in few} == set(corpora)


def test_a_setpoint_is_moved_only_to_where_there_can_be_one():
    cells = grid([0.1, 0.66, 0.67, 2 / 3, 0.9, 0.95], ["stdlib-docs"], 1, "pi", [])
    upward = {cell.setpoint for cell in cells if cell.disturbance == "S* x1.5"}
    assert upward == {0.66}
    for disturbance in set(tracking.DISTURBANCES) - {"S* x1.5"}:
        assert {c.setpoint for c in cells if c.disturbance == disturbance} == {0.66, 0.67, 2 / 3, 0.9}
    for cell in cells:  # as the run itself moves it
        replace(build("pi", setpoint=cell.setpoint), setpoint=tracking.moved(cell.setpoint, cell.disturbance))
    assert tracking.left_out([0.8]) == ["S* x1.5 is left out at S* = 0.8: 1.2 is no setpoint, it must be below 1"]
    assert not tracking.left_out(list(tracking.SETPOINTS))


@pytest.mark.parametrize(("quickly", "said"), [((), 1), (("--quick",), 0)])
def test_what_is_left_out_of_the_grid_is_said_once(monkeypatch, capsys, quickly, said):
    monkeypatch.setattr(tracking, "run_all", lambda cells, *_: [result(cells[0], lambda step: 1.0)])
    monkeypatch.setattr(sys, "argv", ["tracking.py", "--target-s", "0.8", "0.8", *quickly])
    assert tracking.main() == 0
    assert capsys.readouterr().out.count("S* x1.5 is left out at S* = 0.8") == said


def test_the_default_grid_is_that_of_the_stored_runs():
    cells = tracking._cells(tracking.build_parser().parse_args([]))
    assert len(cells) == 120
    names = {f"{cell.key()}.json" for cell in cells}
    stored = {path.name for path in (ROOT / "docs" / "evidence" / "tracking").glob("*.json")}
    assert len(names & stored) >= 110


def test_a_finished_cell_is_known_by_its_settings_and_the_laws_own():
    assert CELL.key() == replace(CELL).key()
    others = replace(CELL, seed=1), replace(CELL, controller="original"), replace(CELL, settings=("--kp=2",))
    assert len({CELL.key(), *(cell.key() for cell in others)}) == 4


def test_finished_runs_keep_their_names():
    """Of a law that stays as it was published, so that its own settings are not what changes the name."""
    cell = quick(list(tracking.SETPOINTS), list(tracking.CORPORA), "original", [])[0]
    assert cell.key() == "9f0065fbce415ed6"
    assert (ROOT / "docs" / "evidence" / "tracking" / f"{cell.key()}.json").is_file()


def test_a_run_of_a_law_s_earlier_code_is_not_reported(monkeypatch, tmp_path):
    paths = keep_quick_runs(tmp_path)
    report = (*QUICK, "--results", str(tmp_path))
    assert guarded(monkeypatch, *report) == 0
    others = replace(CELL, controller="original").key()
    monkeypatch.setitem(evidence.LAW_REVISIONS, "pi", 2)
    assert guarded(monkeypatch, *report) == 2  # none is finished
    assert {path.name for path in keep_quick_runs(tmp_path)}.isdisjoint(path.name for path in paths)
    assert guarded(monkeypatch, *report) == 0
    assert replace(CELL, controller="original").key() == others


def test_a_run_of_an_earlier_training_is_not_reported(monkeypatch):
    before = [replace(CELL, controller=law).key() for law in TRACKING]
    monkeypatch.setattr(evidence, "VERSION", evidence.VERSION + 1)
    assert not {replace(CELL, controller=law).key() for law in TRACKING} & {*before}


def test_an_edited_text_is_another_run(tmp_path):
    text = tmp_path / "text.txt"

    def keys() -> list[str]:
        options = tracking.build_parser().parse_args(["--quick", "--data-dir", str(text), "stdlib-docs"])
        return [cell.key() for cell in tracking._cells(options)]

    text.write_text("what was said " * 50)
    first = keys()
    assert keys() == first
    text.write_text("what is said " * 50)
    changed = [ours != theirs for ours, theirs in zip(first, keys(), strict=True)]
    assert changed == [True, False, True, True]  # the second is of the embedded corpus
    assert tracking.digest("stdlib-docs") == ""


def test_a_run_s_file_says_where_it_was_done(monkeypatch):
    monkeypatch.setattr(tracking, "train", lambda cell, scratch: history(lambda step: 1.0))
    done = tracking.run_cell(CELL)
    assert done["machine"].keys() == {"cpu", "cores", "threads"} and "torch" in done["versions"]
    assert "git_revision" in done
    older = result(CELL, lambda step: 1.0)
    found = tracking.origins([older, done, older])
    assert [origin["runs"] for origin in found] == [2, 1]
    assert found[0]["machine"] is None and found[1]["machine"] == done["machine"]
    assert tracking._spoken(found[0]) == "2 runs: machine, versions and revision not recorded"
    assert tracking._spoken(found[1]).startswith(f"1 run: {done['machine']['cpu']}, ")


def test_a_tick_without_s_can_be_recorded(monkeypatch, tmp_path):
    records = history(lambda step: 1.0)
    records[0] |= {"s": None, "s_ema": None, "held": True}
    monkeypatch.setattr(tracking, "train", lambda cell, scratch: records)
    done = tracking.run_cell(CELL)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(done))
    assert done["trajectory"][0] == [EVERY, None, None, 1.0, 0.1, False]
    assert tracking.read_run(path, CELL) == json.loads(path.read_text())
    assert done["settling"] == 2 * EVERY / STEPS


def test_a_run_that_diverges_is_recorded_and_misses_every_goal(monkeypatch):
    def diverge(cell, scratch):
        raise Diverged("step 70: loss or gradient was not finite")

    monkeypatch.setattr(tracking, "train", diverge)
    done = tracking.run_cell(replace(CELL, disturbance="corpus switched"))
    assert done["failed"] == "step 70: loss or gradient was not finite"
    assert not meets_goals(done)
    facts = summarise([done, result(CELL, lambda step: 1.0)], 2)
    assert facts["failed"] == facts["missed"] == [str(replace(CELL, disturbance="corpus switched"))]
    assert facts["goal_met"] is False
    worst = {name: facts[f"worst_{name}"] for name in tracking.GOALS}
    assert {name: worst[name] for name in ("in_band", "settling", "raw", "recovery")} == {
        "in_band": 0.0, "settling": 1.0, "raw": 1.0, "recovery": 1.0
    }  # fmt: skip


@pytest.mark.slow
def test_a_real_run_that_diverges_ends_neither_the_others_nor_the_grid(tmp_path, capfd):
    cells = [replace(CELL, learning_rate=rate, steps=80) for rate in (1e30, 1e-3)]
    diverged, whole = tracking.run_all(cells, 2, tmp_path, None, Console(quiet=True))
    assert "not finite" in diverged["failed"] and whole["failed"] is None
    assert len(whole["trajectory"]) == 8
    again = tracking.run_all(cells, 2, tmp_path, 0, Console(quiet=True))
    assert again == json.loads(json.dumps([diverged, whole]))
    assert "FutureWarning" not in capfd.readouterr().err  # of libraries, about themselves


@pytest.mark.parametrize("setting", ["lambda_min=1e-4", "lambda-min=1e-4"])
def test_every_flag_of_a_run_can_be_set(monkeypatch, setting):
    """With the bounds that it was published with the original law is as it is without any of ours."""
    asked = []

    def refuse(self, request, console):
        asked.append(request)
        raise InterruptedError

    # Not the class itself: a module that is first imported meanwhile would keep what stands in for it.
    monkeypatch.setattr("granite_scu.run.Run.__init__", refuse)
    options = ["--quick", "--controller", "original", "--set", setting, "lambda_max=2", "lambda_init=1"]
    cell = tracking._cells(tracking.build_parser().parse_args(options))[0]
    with pytest.raises(InterruptedError):
        tracking.train(cell)
    given = {name: value for name, value in vars(asked[0].control).items() if name != "controller"}
    assert build("original", **given) == build("original", setpoint=cell.setpoint)


def guarded(monkeypatch, *arguments: str) -> int:
    """The exit code of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["tracking.py", *arguments])
    return guard.guarded(tracking.main, False)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (["kp=-1"], "--kp -1.0: must be positive and finite"),
        (["kp=nan"], "--kp nan: must be positive and finite"),
        (["kp=inf"], "--kp inf: must be positive and finite"),
        (["ki=0"], "--ki 0.0: must be positive and finite"),
        (["kp=two"], "--kp: invalid float value: 'two'"),
        (["kp"], "--kp: expected one argument"),
        (["nonsense=1"], "unknown flag --nonsense"),
        (["lamda_min=1e-4"], "unknown flag --lamda-min: did you mean --lambda-min?"),
        (["control.kpp=2"], "control.kpp"),
        (["actuator=decoupled"], "--actuator decoupled: pi's first lambda"),
        (["kp=2", "lambda_min=2", "lambda_max=1"], "--lambda-min 2.0: must not exceed --lambda-max 1"),
        (["max_steps=100"], "--set: --max-steps is the grid's own; leave it out"),
        (["control.target_s=auto"], "--set: --target-s is the grid's own; leave it out"),
        (["output_dir=runs"], "--set: --output-dir is the grid's own; leave it out"),
    ],
)
def test_a_wrong_setting_is_one_line_before_any_run_starts(monkeypatch, capsys, setting, said):
    def start(*arguments, **named):
        pytest.fail("a worker was started")

    monkeypatch.setattr(tracking, "ProcessPoolExecutor", start)
    assert guarded(monkeypatch, "--quick", "--set", *setting) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and said in told.err


def test_a_setting_that_a_law_refuses_itself_is_refused_in_time():
    """The configuration lets it through: the original law's own first lambda is 1."""
    with pytest.raises(UserError, match=r"--controller original: lambda_init 1\.0"):
        tracking.request_of(replace(CELL, controller="original", settings=("--lambda-max=0.1",)), "unused")


def test_the_example_in_the_help_is_one():
    [action] = [action for action in tracking.build_parser()._actions if action.dest == "set"]
    settings = action.help.rpartition(": ")[2].split()
    assert "kp=2" in settings
    request = tracking.request_of(tracking._cells(asked("--quick", "--set", *settings))[0], "unused")
    assert request.control.kp == 2


def asked(*arguments: str):
    return tracking.build_parser().parse_args(arguments)


@pytest.mark.parametrize("setting", ["isolate_documents", "isolate-documents", "data.isolate_documents=true"])
def test_documents_are_kept_apart_only_where_that_is_set(setting):
    usual, apart = (tracking._cells(asked("--quick", *more))[0] for more in ((), ("--set", setting)))
    assert not tracking.request_of(usual, "unused").data.isolate_documents
    assert tracking.request_of(apart, "unused").data.isolate_documents
    assert usual.key() != apart.key()


class AtOnce(ThreadPoolExecutor):
    """All that is submitted has ended when the first is asked for."""

    def submit(self, *arguments, **named):
        future = super().submit(*arguments, **named)
        wait([future])
        return future


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("--data-dir text: has no words"), 2), (RunFailed("no memory"), 1)]
)
def test_an_error_of_a_run_is_one_line_and_the_finished_runs_are_kept(monkeypatch, capsys, tmp_path, error, code):
    def run(cell, scratch):
        if cell.disturbance:  # the last of the four
            raise error
        return result(cell, lambda step: 1.0)

    monkeypatch.setattr(tracking, "ProcessPoolExecutor", lambda jobs, **_: AtOnce(jobs))
    monkeypatch.setattr(tracking, "run_cell", run)
    assert guarded(monkeypatch, "--quick", "--results", str(tmp_path)) == code
    assert capsys.readouterr().err == f"error: {error}\n"
    finished = tracking._cells(asked("--quick"))[:3]
    assert {path.name for path in tmp_path.iterdir()} == {f"{cell.key()}.json" for cell in finished}
    for cell in finished:
        tracking.read_run(tmp_path / f"{cell.key()}.json", cell)


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", tracking.DISTURBANCES)
def test_a_real_run_is_disturbed_at_its_middle(monkeypatch, disturbance):
    monkeypatch.setattr(tracking, "EVERY", 4)
    cell = replace(CELL, steps=16)
    plain = tracking.train(cell)
    disturbed = tracking.train(replace(cell, disturbance=disturbance))
    assert [record["step"] for record in disturbed] == [4, 8, 12, 16]
    assert disturbed[:2] == [{**ours, **_times(theirs)} for ours, theirs in zip(plain, disturbed, strict=False)][:2]
    changed = {"learning rate x3": "lr", "corpus switched": "data_bpt"}.get(disturbance, "s_target")
    assert disturbed[2][changed] != plain[2][changed]
    if disturbance == "learning rate x3":
        assert disturbed[2]["lr"] == pytest.approx(3 * plain[2]["lr"])


def _times(record: dict) -> dict:
    """What differs between two equal runs."""
    return {name: record[name] for name in ("tokens_per_s", "samples_per_s", "mfu")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target-s", "1.5"], "--target-s 1.5"),
        (["--seeds", "0"], "--seeds 0"),
        (["--jobs", "0"], "--jobs 0"),
        (["--max-runs", "-1"], "--max-runs -1: must be at least 0"),
        (["--max-runs", "0"], "no run of this grid is finished"),
        (["--controller", "pid"], "--controller: invalid choice: 'pid' (choose from 'pi', 'p', 'i', 'original'"),
        (["--seeds", "many"], "--seeds: invalid int value: 'many'"),
        (["--set"], "--set: expected at least one argument"),
        (["--nonsense"], "--nonsense"),
        (["--data-dir", "nowhere/at/all"], "--data-dir nowhere/at/all: no such file"),
        (["--results", "README.md"], "--results README.md: is a file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said):
    ran = call(*arguments)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and said in ran.stderr


def test_only_laws_that_heed_a_setpoint_can_be_measured():
    with pytest.raises(UserError, match="'fixed'"):
        tracking.build_parser().parse_args(["--controller", "fixed"])


QUICK = ("--quick", "--target-s", "0.1", "--max-runs", "0", "--data-dir", "stdlib-docs")


def keep_quick_runs(folder: Path, but_for: tuple[str, ...] = ()) -> list[Path]:
    """The runs of ``QUICK`` as files, without some of their entries."""
    paths = []
    for cell in dict.fromkeys(quick([0.1], ["stdlib-docs"], "pi", [])):
        done = result(cell, lambda step: 1.0 if step != STEPS - EVERY else 1.2)
        kept = {name: value for name, value in done.items() if name not in but_for}
        paths.append(folder / f"{cell.key()}.json")
        paths[-1].write_text(json.dumps(kept))
    return paths


def test_finished_runs_are_read_and_reported_as_json(tmp_path):
    keep_quick_runs(tmp_path)
    ran = call(*QUICK, "--json", "--results", str(tmp_path), "--plot", str(tmp_path / "tracking"))
    assert ran.returncode == 0, ran.stderr
    assert "machine, versions and revision not recorded" in ran.stderr
    facts = json.loads(ran.stdout)
    assert facts["goal_met"] is True and facts["worst_settling"] == EVERY / (STEPS // 2)
    assert facts["worst_overshoot"] == facts["worst_peak"] == pytest.approx(math.sqrt(1.2) - 1, abs=1e-3)
    assert [origin["machine"] for origin in facts["origins"]] == [None]
    assert (tmp_path / "tracking.png").stat().st_size > 1000


def test_of_an_older_file_what_it_lacks_is_measured_from_its_trajectory(tmp_path):
    paths = keep_quick_runs(tmp_path)
    newer = json.loads(call(*QUICK, "--json", "--results", str(tmp_path)).stdout)
    late = ("failed", "in_band_early", "rise", "iae", "travel", *tracking.EXCURSION)
    for path in paths:
        older = {name: value for name, value in json.loads(path.read_text()).items() if name not in late}
        path.write_text(json.dumps({**older, "trajectory": [point[:5] for point in older["trajectory"]]}))
    before = {path: path.read_text() for path in paths}
    found = json.loads(call(*QUICK, "--json", "--results", str(tmp_path)).stdout)
    for ours, theirs in zip(found.pop("results"), newer.pop("results"), strict=True):
        assert {**ours, "trajectory": theirs["trajectory"]} == theirs
    assert found == newer
    assert newer["worst_iae"] > 0 and newer["worst_peak"] > 0
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_in_an_older_trajectory_lambda_on_a_bound_is_saturated():
    settings = "--lambda-min=1e-4", "--control.lambda_max=2"
    strengths = 1e-6, 1e-4, 1.0, 2.0, 1e6

    def marks(cell: Cell) -> list[bool]:
        points = [[EVERY, 0.1, 0.1, strength, 0.1] for strength in strengths]
        return [record["saturated"] for record in tracking.course(cell, points)]

    assert marks(CELL) == [True, False, False, False, True]
    assert marks(replace(CELL, settings=settings)) == [True, True, False, True, True]
    told = [[EVERY, 0.1, 0.1, 1.0, 0.1, True]]
    assert tracking.course(CELL, told)[0]["saturated"]


def test_a_part_of_the_grid_is_reported_as_one(tmp_path):
    paths = keep_quick_runs(tmp_path)
    paths[0].unlink()
    ran = call(*QUICK, "--json", "--results", str(tmp_path))
    assert ran.returncode == 0
    assert f"{len(paths) - 1} of {len(paths)} runs; 1 missing" in ran.stderr
    assert json.loads(ran.stdout)["goal_met"] is None


def test_a_failed_run_in_results_is_named_and_is_exit_code_1(tmp_path):
    path, *others = keep_quick_runs(tmp_path)
    cell = Cell.of(json.loads(path.read_text()))
    failed = {"cell": vars(cell), "failed": "it diverged", **tracking.nothing_held(cell), "trajectory": []}
    path.write_text(json.dumps(failed))
    ran = call(*QUICK, "--results", str(tmp_path), "--plot", str(tmp_path / "tracking"))
    assert ran.returncode == 1
    assert f"failed {cell}: it diverged" in ran.stdout and "Traceback" not in ran.stderr
    assert f"{len(others) + 1} of {len(others) + 1} runs" in ran.stdout


@pytest.mark.slow
def test_an_interrupt_leaves_neither_a_process_nor_a_half_run(tmp_path):
    command = [sys.executable, "benchmarks/tracking.py", "--jobs", "2", "--results", str(tmp_path / "results")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    restored = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a background job ignores Ctrl-C
    pipes: dict = {"start_new_session": True, "stderr": subprocess.PIPE, "preexec_fn": restored}
    ran = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("tmp*/tmp*/*")) and time.monotonic() < deadline:  # a run has begun
        time.sleep(0.5)
    assert list(tmp_path.glob("tmp*/tmp*/*"))
    os.killpg(ran.pid, signal.SIGINT)
    _, said = ran.communicate(timeout=60)
    assert ran.returncode == 130 and b"Traceback" not in said
    deadline = time.monotonic() + 30
    while (is_there := _is_there(ran.pid)) and time.monotonic() < deadline:  # multiprocessing's tracker ends after us
        time.sleep(0.1)
    assert not is_there
    assert not [*tmp_path.glob("tmp*"), *tmp_path.glob("results")]


@pytest.mark.parametrize("content", ["", '{"cell": {"setp', "[]", "{}", "other", "part"])
def test_a_file_that_is_not_the_run_s_is_named(tmp_path, content):
    path, *_ = keep_quick_runs(tmp_path, but_for=("raw",) if content == "part" else ())
    if content == "other":
        path.write_text(json.dumps(result(CELL, lambda step: 1.0)))
    elif content != "part":
        path.write_text(content)
    ran = call(*QUICK, "--results", str(tmp_path))
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and f"--results: {path} is not" in ran.stderr and "move it away" in ran.stderr
    assert "Traceback" in call(*QUICK, "--results", str(tmp_path), "--debug").stderr


KILLED_WHILE_WRITING = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from rich.console import Console
from benchmarks import tracking
from granite_scu import run_folder

def run(cell, scratch):
    return {"cell": vars(cell), "failed": None, **tracking.nothing_held(cell), "text": "x" * 1_000_000}

run_folder.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # written, and not yet on the disk
tracking.ProcessPoolExecutor = lambda jobs, **_: ThreadPoolExecutor(jobs)
tracking.run_cell = run
cell = tracking.Cell(0.1, 1e-3, 16, "stdlib-docs", 0)
tracking.run_all([cell], 1, Path(sys.argv[1]), None, Console(quiet=True))
"""


def test_a_kill_while_a_run_is_written_leaves_no_half_of_it(tmp_path):
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert not list(tmp_path.glob("*.json"))


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
