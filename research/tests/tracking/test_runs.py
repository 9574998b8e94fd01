import json
import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
from rich.console import Console
from tracked import CELL, QUICK, asked, guarded, history, keep_quick_runs, result, stored_runs

from granite_scu.config.errors import Diverged, RunFailed, UserError
from research import workers
from research.run_store import FinishedRun, RunStore
from research.tracking import command as tracking
from research.tracking import figures as tracking_figures
from research.tracking import runs as tracking_runs
from research.tracking.figures import meets_goals, summarise
from research.tracking.grid import EVERY, STEPS, TrackingCell


def test_stored_runs_of_the_default_law_keep_their_figures():
    """Those were measured by the law's own filter, which is the one that now judges all."""
    compared = 0
    for finished in stored_runs():
        stored = finished.record
        cell = TrackingCell.of(stored)
        if cell.controller == "pi":
            found = tracking_runs.read_run(finished, cell)
            assert [found[name] for name in ("settling", "in_band", "recovery")] == [
                stored[name] for name in ("settling", "in_band", "recovery")
            ]
            for name in {"overshoot", "raw", *tracking_figures.EXCURSION} & stored.keys():
                assert found[name] == pytest.approx(stored[name], abs=1e-3)
            compared += 1
    assert compared > 50


def test_a_tick_without_s_can_be_recorded(monkeypatch, tmp_path):
    records = history(lambda step: 1.0)
    records[0] |= {"s": None, "s_ema": None, "held": True}
    monkeypatch.setattr(tracking_runs, "train", lambda cell, scratch: records)
    done = tracking_runs.run_cell(CELL)
    stored = json.loads(json.dumps(done))
    assert done["trajectory"][0] == [EVERY, None, None, 1.0, 0.1, False]
    assert tracking_runs.read_run(FinishedRun(CELL.key(), stored, "here"), CELL) == stored
    assert done["settling"] == 2 * EVERY / STEPS


def test_a_run_that_diverges_is_recorded_and_misses_every_goal(monkeypatch):
    def diverge(cell, scratch):
        raise Diverged("step 70: loss or gradient was not finite")

    monkeypatch.setattr(tracking_runs, "train", diverge)
    done = tracking_runs.run_cell(replace(CELL, disturbance="corpus switched"))
    assert done["failed"] == "step 70: loss or gradient was not finite"
    assert not meets_goals(done)
    facts = summarise([done, result(CELL, lambda step: 1.0)], 2)
    assert facts["failed"] == facts["missed"] == [str(replace(CELL, disturbance="corpus switched"))]
    assert facts["goal_met"] is False
    worst = {name: facts[f"worst_{name}"] for name in tracking_figures.GOALS}
    assert {name: worst[name] for name in ("in_band", "settling", "raw", "recovery")} == {
        "in_band": 0.0, "settling": 1.0, "raw": 1.0, "recovery": 1.0
    }  # fmt: skip


@pytest.mark.slow
def test_a_real_run_that_diverges_ends_neither_the_others_nor_the_grid(tmp_path, capfd):
    cells = [replace(CELL, learning_rate=rate, steps=80) for rate in (1e15, 1e-3)]
    diverged, whole = tracking_runs.run_all(cells, 2, tmp_path, None, Console(quiet=True))
    assert "not finite" in diverged["failed"] and whole["failed"] is None
    assert len(whole["trajectory"]) == 8
    again = tracking_runs.run_all(cells, 2, tmp_path, 0, Console(quiet=True))
    assert again == json.loads(json.dumps([diverged, whole]))
    assert "FutureWarning" not in capfd.readouterr().err  # of libraries, about themselves


class AtOnce(ThreadPoolExecutor):
    """All that is submitted has ended when the first is asked for."""

    def submit(self, *arguments, **named):
        future = super().submit(*arguments, **named)
        wait([future])
        return future


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("--data-dir text: has no words"), 2), (RunFailed("no memory"), 1)]
)
def test_an_error_of_a_run_is_one_line_and_the_finished_runs_are_kept(bf16, monkeypatch, capsys, tmp_path, error, code):
    def run(cell, scratch):
        if cell.disturbance:  # the last of the four
            raise error
        return result(cell, lambda step: 1.0)

    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda jobs, **_: AtOnce(jobs))
    monkeypatch.setattr(tracking_runs, "run_cell", run)
    assert guarded(monkeypatch, "--quick", "--results", str(tmp_path)) == code
    assert capsys.readouterr().err == f"error: {error}\n"
    finished = tracking._cells(asked("--quick"))[:3]
    assert {path.name for path in tmp_path.iterdir()} == {f"{cell.key()}.json" for cell in finished}
    kept = {run.key: run for run in RunStore("--results", tmp_path).read()}
    for cell in finished:
        tracking_runs.read_run(kept[cell.key()], cell)


def test_of_an_older_file_what_it_lacks_is_measured_from_its_trajectory(monkeypatch, capsys, tmp_path):
    def report() -> dict:
        assert guarded(monkeypatch, *QUICK, "--json", "--results", str(tmp_path)) == 0
        return json.loads(capsys.readouterr().out)

    paths = keep_quick_runs(tmp_path)
    newer = report()
    late = ("failed", "in_band_early", "rise", "iae", "travel", *tracking_figures.EXCURSION)
    for path in paths:
        older = {name: value for name, value in json.loads(path.read_text()).items() if name not in late}
        path.write_text(json.dumps({**older, "trajectory": [point[:5] for point in older["trajectory"]]}))
    before = {path: path.read_text() for path in paths}
    found = report()
    for ours, theirs in zip(found.pop("results"), newer.pop("results"), strict=True):
        assert {**ours, "trajectory": theirs["trajectory"]} == theirs
    assert found == newer
    assert newer["worst_iae"] > 0 and newer["worst_peak"] > 0
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def _point(index: int, value: float):
    """Changes one entry of the tick in the middle."""

    def change(record: dict) -> None:
        record["trajectory"][len(record["trajectory"]) // 2][index] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(machine="x"),
        lambda record: record.update(machine={}, versions={}, git_revision=None),
        lambda record: record.update(trajectory=record["trajectory"][: len(record["trajectory"]) // 2]),
        lambda record: record.update(trajectory=[]),
        lambda record: record.update(trajectory=[[]]),
        _point(0, 10_000),
        _point(1, math.nan),
        _point(1, -0.1),
        _point(1, 1.1),
        _point(3, -1.0),
        _point(3, math.inf),
        _point(4, 0.0),
        _point(4, None),
        lambda record: result(CELL, lambda step: 1.0),
        lambda record: record.pop("raw") and None,
        "",
        '{"cell": {"setp',
        "[]",
        "{}",
    ],
)
def test_a_record_that_no_run_left_is_named_and_nothing_is_reported(monkeypatch, capsys, tmp_path, change):
    path = keep_quick_runs(tmp_path)[0]
    record = json.loads(path.read_text())
    path.write_text(change if isinstance(change, str) else json.dumps(change(record) or record))
    assert guarded(monkeypatch, *QUICK, "--results", str(tmp_path)) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"error: --results: {path} is not the record of") and told.err.count("\n") == 1
    assert told.out == ""


def test_in_an_older_trajectory_lambda_on_a_bound_is_saturated():
    settings = "--lambda-min=1e-4", "--control.lambda_max=2"
    lams = 1e-6, 1e-4, 1.0, 2.0, 1e6

    def marks(cell: TrackingCell) -> list[bool]:
        points = [[EVERY, 0.1, 0.1, lam, 0.1] for lam in lams]
        return [record["saturated"] for record in tracking_runs.course(cell, points)]

    assert marks(CELL) == [True, False, False, False, True]
    assert marks(replace(CELL, settings=settings)) == [True, True, False, True, True]
    told = [[EVERY, 0.1, 0.1, 1.0, 0.1, True]]
    assert tracking_runs.course(CELL, told)[0]["saturated"]
