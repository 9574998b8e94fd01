import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tracked import CELL, QUICK, ROOT, asked, guarded, keep_quick_runs, result, stored_runs

from granite_scu.hardware import machine
from research import workers
from research.comparison import evidence
from research.tracking import command as tracking
from research.tracking import figures as tracking_figures
from research.tracking import grid as tracking_grid
from research.tracking import training as tracking_training
from research.tracking.grid import EVERY, STEPS, TrackingCell


@pytest.mark.parametrize(("quickly", "said"), [((), 1), (("--quick",), 0)])
def test_what_is_left_out_of_the_grid_is_said_once(monkeypatch, capsys, quickly, said):
    monkeypatch.setattr(tracking, "run_all", lambda cells, *_: [result(cells[0], lambda step: 1.0)])
    monkeypatch.setattr(sys, "argv", ["tracking.py", "--target-s", "0.8", "0.8", *quickly])
    assert tracking.main() == 0
    assert capsys.readouterr().out.count("S* x1.5 is left out at S* = 0.8") == said


def test_the_default_grid_is_that_of_the_stored_runs():
    cells = tracking._cells(asked())
    assert len(cells) == 120
    assert {cell.key() for cell in cells} <= {run.key for run in stored_runs()}


def test_a_run_of_a_law_s_earlier_code_is_not_reported(monkeypatch, tmp_path):
    paths = keep_quick_runs(tmp_path)
    report = (*QUICK, "--results", str(tmp_path))
    assert guarded(monkeypatch, *report) == 0
    others = replace(CELL, controller="original").key()
    monkeypatch.setitem(evidence.LAW_REVISIONS, "pi", 99)
    assert guarded(monkeypatch, *report) == 2  # none is finished
    assert {path.name for path in keep_quick_runs(tmp_path)}.isdisjoint(path.name for path in paths)
    assert guarded(monkeypatch, *report) == 0
    assert replace(CELL, controller="original").key() == others


def test_runs_of_a_machine_that_computes_in_another_precision_are_others(monkeypatch, capsys, tmp_path):
    """None is taken for one of another machine's, and those that are finished are reported there all the same."""
    options = asked("--quick")
    here = {cell.key() for cell in tracking._cells(options)}
    monkeypatch.setattr(machine, "resolve_precision", lambda *_: "32-true")
    assert here.isdisjoint(cell.key() for cell in tracking._in_precision(tracking._cells(options), options))
    monkeypatch.setattr(machine, "resolve_precision", lambda *_: "bf16-mixed")
    assert here == {cell.key() for cell in tracking._in_precision(tracking._cells(options), options)}

    keep_quick_runs(tmp_path)
    monkeypatch.setattr(machine, "resolve_precision", lambda *_: "32-true")
    assert guarded(monkeypatch, *QUICK, "--results", str(tmp_path)) == 0
    for path in tmp_path.iterdir():
        record = json.loads(path.read_text())
        path.rename(tmp_path / f"{TrackingCell.of({'cell': record['cell'] | {'precision': '32-true'}}).key()}.json")
    assert guarded(monkeypatch, *QUICK, "--results", str(tmp_path)) == 2, "they are of another cell"
    for path in tmp_path.iterdir():
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {"cell": record["cell"] | {"precision": "32-true"}}))
    assert guarded(monkeypatch, *QUICK, "--results", str(tmp_path)) == 0
    assert "runs in 32-true: the published runs are in bf16" in capsys.readouterr().out


def test_an_edited_text_is_another_run(tmp_path):
    text = tmp_path / "text.txt"

    def keys() -> list[str]:
        options = asked("--quick", "--data-dir", str(text), "stdlib-docs")
        return [cell.key() for cell in tracking._cells(options)]

    text.write_text("what was said " * 50)
    first = keys()
    assert keys() == first
    text.write_text("what is said " * 50)
    changed = [ours != theirs for ours, theirs in zip(first, keys(), strict=True)]
    assert changed == [True, False, True, True]  # the second is of the embedded corpus
    assert tracking_grid.digest("stdlib-docs") == ""


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (["kp=-1"], "--kp -1.0: must be positive and finite"),
        (["kp=nan"], "--kp nan: must be positive and finite"),
        (["kp=inf"], "--kp inf: must be positive and finite"),
        (["ki=0"], "--ki 0.0: must be positive and finite"),
        (["kp=two"], "--kp two: must be a number"),
        (["kp"], "--kp: expected one argument"),
        (["nonsense=1"], "unknown flag --nonsense"),
        (["lamda_min=1e-4"], "unknown flag --lamda-min: did you mean --lambda-min?"),
        (["control.kpp=2"], "control.kpp"),
        (["actuator=decoupled"], "--actuator decoupled: pi's first lambda"),
        (["kp=2", "lambda_min=2", "lambda_max=1"], "--lambda-max 1.0: must be at least --lambda-min"),
        (["max_steps=100"], "--set: --max-steps is the grid's own; leave it out"),
        (["control.target_s=0.3"], "--set: --target-s is the grid's own; leave it out"),
        (["output_dir=runs"], "--set: --output-dir is the grid's own; leave it out"),
        (["num_epochs=0.1", "max_steps=700"], "--set: --num-epochs is the grid's own; leave it out"),
        (["max_time=00:00:01:00"], "--set: --max-time is the grid's own; leave it out"),
        (["early_stopping=3"], "--set: --early-stopping is the grid's own; leave it out"),
        (["stop_at_equilibrium=20"], "--set: --stop-at-equilibrium is the grid's own; leave it out"),
        (["print-config"], "--set: print_config is no setting of a run; leave it out"),
        (["help"], "--set: help is no setting of a run; leave it out"),
        (["kp=2", "kp=3"], "--set: kp is given twice; leave one out"),
    ],
)
def test_a_wrong_setting_is_one_line_before_any_run_starts(monkeypatch, capsys, setting, said):
    def start(*arguments, **named):
        pytest.fail("a worker was started")

    monkeypatch.setattr(workers, "ProcessPoolExecutor", start)
    assert guarded(monkeypatch, "--quick", "--set", *setting) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and said in told.err


def test_the_example_in_the_help_is_one():
    [action] = [action for action in tracking.build_parser()._actions if action.dest == "set"]
    settings = action.help.rpartition(": ")[2].split()
    assert "kp=2" in settings
    request = tracking_training.request_of(tracking._cells(asked("--quick", "--set", *settings))[0], "unused")
    assert request.control.kp == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target-s", "1.5"], "--target-s 1.5"),
        (["--seeds", "0"], "--seeds 0"),
        (["--jobs", "0"], "--jobs 0"),
        (["--max-runs", "-1"], "--max-runs -1: must be at least 0"),
        (["--max-runs", "0"], "no run of this grid is finished"),
        (["--controller", "fixed"], "--controller fixed: must be one of pi, p, i, original"),
        (["--seeds", "many"], "--seeds many: must be a whole number"),
        (["--set"], "--set: expected at least one argument"),
        (["--nonsense"], "--nonsense"),
        (["--data-dir", "nowhere/at/all"], "--data-dir nowhere/at/all: no such file"),
        (["--results", "README.md"], "--results README.md: is a file"),
        (["--results", "README.md/in"], "--results README.md/in: "),
        (["--plot", "README.md/in/it"], "--plot README.md/in: "),
        (["--quick", "--seeds", "5"], "--seeds: the four runs of --quick have seeds of their own"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, said):
    assert guarded(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


def test_finished_runs_are_read_and_reported_as_json(tmp_path):
    keep_quick_runs(tmp_path)
    line = [sys.executable, "-m", "research.tracking", *QUICK, "--json", "--results", str(tmp_path)]
    line += ["--plot", str(tmp_path / "tracking")]
    here = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # which workers set
    ran = subprocess.run(line, cwd=ROOT, env=here, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "machine, versions and revision not recorded" in ran.stderr
    facts = json.loads(ran.stdout)
    assert facts["goal_met"] is True and facts["worst_settling"] == EVERY / (STEPS // 2)
    assert facts["worst_overshoot"] == facts["worst_peak"] == pytest.approx(math.sqrt(1.2) - 1, abs=1e-3)
    assert [origin["machine"] for origin in facts["origins"]] == [None]
    assert (tmp_path / "tracking.png").stat().st_size > 1000


def test_a_part_of_the_grid_is_reported_as_one(monkeypatch, capsys, tmp_path):
    paths = keep_quick_runs(tmp_path)
    paths[0].unlink()
    assert guarded(monkeypatch, *QUICK, "--json", "--results", str(tmp_path)) == 0
    told = capsys.readouterr()
    assert f"{len(paths) - 1} of {len(paths)} runs; 1 missing" in told.err
    assert json.loads(told.out)["goal_met"] is None


def test_a_failed_run_is_named_without_its_figures_and_is_exit_code_1(monkeypatch, capsys, tmp_path):
    path, *_ = paths = keep_quick_runs(tmp_path)
    record = json.loads(path.read_text())
    kept = {name: record[name] for name in ("cell", *tracking_figures.GOALS, "lambda")}
    path.write_text(json.dumps({**kept, "failed": "it diverged", "trajectory": []}))
    assert guarded(monkeypatch, *QUICK, "--results", str(tmp_path), "--plot", str(tmp_path / "tracking")) == 1
    told = capsys.readouterr().out
    assert f"failed {TrackingCell.of(record)}: it diverged" in told
    assert f"{len(paths)} of {len(paths)} runs" in told
