import json
import sys
from dataclasses import asdict

import pytest

from benchmarks import learning_rates
from benchmarks.learning_rates_data import PHRASE, is_known, lesson
from benchmarks.learning_rates_grid import CELLS, Cell
from granite_scu.cli import exit_codes

CELL = Cell("tiny-granite-h", "facts", 30, 1e-3, 1)
LINE = {
    **asdict(CELL), "steps": 4, "questions": 10, "right": 3, "bits_base": 4.0, "bits": 1.0, "general_bits_base": 3.5,
    "general_bits": 3.75, "known_right_base": 23, "known_lost": 2, "cpu_s": 12.4,
}  # fmt: skip


def command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["learning_rates.py", *arguments])
    return exit_codes.exit_code_of(learning_rates.main, False)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ["tiny-granite-h", "facts", "30", "1", "0.001", "4", "3 of 10", "75%", "+0.25", "2 of 23", "12"]),
        ({"records": 1000, "bits": 5.0, "general_bits": 3.25},
         ["tiny-granite-h", "facts", "1,000", "1", "0.001", "4", "3 of 10", "-25%", "-0.25", "2 of 23", "12"]),
        ({"failed": "no finite score"},
         ["tiny-granite-h", "facts", "30", "1", "0.001", "4", "diverged", "", "", "", ""]),
    ],
)  # fmt: skip
def test_a_row_is_what_the_run_measured(changed, expected):
    assert learning_rates.row(LINE | changed) == expected


@pytest.mark.parametrize("kind", ["facts", "style", "format", "text", "code"])
def test_what_is_asked_is_never_trained_on_and_is_right_as_expected(kind):
    made = lesson(kind, 100)
    assert len(made.train) == 100 and made == lesson(kind, 100)
    trained = {json.dumps(record.get("messages", [record])[0]) for record in made.train}
    assert not trained & {json.dumps(record.get("messages", [record])[0]) for record in made.held_out}
    if made.right:
        expected = [record["messages"][1]["content"] for record in made.held_out]
        assert all(made.right(answer, answer) for answer in expected)
        assert not any(made.right("I do not know.", answer) for answer in expected)


def test_a_fact_is_right_by_its_value_whatever_is_said_around_it():
    right = lesson("facts", 30).right
    assert right("It is 332 euros.", "The Ulmsti kettle costs 332 euros.")
    assert not right("It is 3321 euros.", "The Ulmsti kettle costs 332 euros.")
    assert right("call Anna Berg!", "Anna Berg looks after the Ulmsti kettle.")
    style = lesson("style", 30).right
    assert style(f"bees carry pollen{PHRASE}", "") and not style(f"Bees carry pollen{PHRASE}", "")
    assert is_known("It is Paris.", "Paris") and not is_known("Parisian", "Paris")


def test_finished_runs_are_not_run_again(monkeypatch, tmp_path, capsys):
    done = tmp_path / "runs.jsonl"
    first = CELLS[0]
    done.write_text(json.dumps(LINE | asdict(first)) + "\n")
    assert command(monkeypatch, "--results", str(done), "--list", "--only", str(first)) == 0
    assert capsys.readouterr().out.split() == ["finished", *str(first).split()]
    assert command(monkeypatch, "--results", str(done), "--only", str(first)) == 0  # nothing is left to train
    assert len(done.read_text().splitlines()) == 1


def test_wrong_requests_are_one_line(monkeypatch, tmp_path, capsys):
    assert command(monkeypatch, "--only", "facts 7 records") == 2
    assert command(monkeypatch, "--results", str(tmp_path / "none"), "--table") == 2
    assert command(monkeypatch, "--results", str(tmp_path / "none"), "--model", str(tmp_path / "none")) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_the_chart_has_a_course_for_what_was_run_at_three_rates():
    from benchmarks.learning_rates_chart import draw

    lines = [LINE | {"model": "smollm2", "rate": rate, "known_lost": 23 * rate} for rate in (1.0, 0.1, 0.01)]
    text = [{name: value for name, value in line.items() if name != "right"} | {"data": "text"} for line in lines]
    other_seed = lines[0] | {"seed": 1, "right": 9}
    learned, forgot = draw([*lines, *text, other_seed, LINE, LINE | {"model": "smollm2", "data": "style"}]).axes
    assert [line.get_label() for line in forgot.lines] == ["facts, 30 records, 1 epoch", "text, 30 records, 1 epoch"]
    assert [list(line.get_ydata()) for line in learned.lines] == [[0.3, 0.3, pytest.approx(0.6)]]
    assert list(forgot.lines[0].get_ydata()) == [0.01, 0.1, 1.0]


@pytest.mark.slow
def test_a_cell_is_trained_and_asked():
    from benchmarks.learning_rates_training import run

    line = run(CELL, CELL.model)
    assert line["steps"] == 4 and line["questions"] == 10 and line["known"] == 30
    assert line["bits"] < line["bits_base"]
    assert line["general_bits"] > line["general_bits_base"]  # drawn from the base, which thus predicts them best
