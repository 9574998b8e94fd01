"""What the command runs, and which finished runs it takes for done."""

import json
import sys
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict

import pytest

from benchmarks import cells
from granite_scu.cli import exit_codes
from research.real import command, training
from research.real.grid import STAGES, Cell, Stage, to_do
from research.real.tasks import digest

CELL = Cell("smollm2", "museum", "plain", 0.0, 1e-3)
LINE = asdict(CELL) | {"digest": digest("museum"), "device": "cpu", "points": {}}


def called(monkeypatch, results, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["real", "--results", str(results), *flags])
    return exit_codes.exit_code_of(command.main, False)


def test_a_run_on_another_device_does_not_count(monkeypatch, tmp_path, capsys):
    results = tmp_path / "runs.jsonl"
    cells.append(results, LINE | {"device": "cuda"})
    cells.append(results, LINE)
    for flags, count in ((("B",), 1), (("B", "--device", "cuda"), 1), (("C",), 1), (("A",), 0)):
        assert called(monkeypatch, results, "--list", "--stage", *flags) == 0
        assert capsys.readouterr().out.count("finished") == count
    results.write_text(json.dumps(LINE) + "\n")
    assert called(monkeypatch, results, "--list", "--stage", "C") == 0
    assert "finished" not in capsys.readouterr().out


@pytest.fixture
def trained(monkeypatch, line) -> list[Cell]:
    """The cells that are run, one after the other in this process, of a stage of a fixed weight on two tasks."""
    made = []

    def run(cell: Cell, *_) -> dict:
        made.append(cell)
        return line(cell, best=3e-3) | {"digest": digest(cell.task), "device": "cpu"}

    @contextmanager
    def workers(*_):
        yield here

    class here:
        @staticmethod
        def submit(call, *of) -> Future:
            (future := Future()).set_result(call(*of))
            return future

    monkeypatch.setattr(training, "run", run)
    monkeypatch.setattr(command, "workers", workers)
    weights = [[("kl", 1.0), ("kl", 10.0)]]
    monkeypatch.setitem(STAGES, "D", Stage(("tiny-granite-h",), ("museum", "telegram"), weights))
    return made


def test_one_call_runs_what_a_share_of_the_tasks_has_only_by_the_results_of_the_others(trained, monkeypatch, tmp_path):
    results = tmp_path / "runs.jsonl"
    assert called(monkeypatch, results, "--stage", "D", "--jobs", "2") == 0
    finished = cells.read(results, Cell.of)
    assert {(cell.task, cell.seed) for cell in finished} >= {("museum", 4), ("telegram", 4)}
    assert not list(to_do(STAGES["D"], finished)) and len(trained) == len(finished)
    assert all("git_revision" in of for of in finished.values())
    assert sum("at_base" in of for of in finished.values()) == 2  # once a task


def test_the_tasks_of_a_shard_are_shared_among_its_processes(trained, monkeypatch, tmp_path):
    assert called(monkeypatch, tmp_path / "runs.jsonl", "--stage", "D", "--shard", "2/2", "--jobs", "2") == 0
    assert {cell.task for cell in trained} == {"telegram"}


def test_a_run_of_other_records_stops_the_command_and_is_in_no_table(trained, monkeypatch, tmp_path, capsys):
    results = tmp_path / "runs.jsonl"
    cells.append(results, LINE | {"base": "tiny-granite-h", "digest": "another"})
    assert called(monkeypatch, results, "--stage", "D", "--jobs", "2") == 2 and not trained
    assert "1 of museum; name another file" in " ".join(capsys.readouterr().err.split())
    assert called(monkeypatch, results, "--stage", "D", "--list") == 0
    told = capsys.readouterr()
    assert "1 of museum; left out" in " ".join(told.err.split()) and "finished" not in told.out
