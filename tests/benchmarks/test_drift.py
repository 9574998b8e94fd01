import sys
from dataclasses import asdict

import pytest

from benchmarks import drift
from benchmarks.drift_chart import curves
from benchmarks.drift_grid import CELLS, Cell
from granite_scu.cli import exit_codes

POINT = {"drift": 0.021, "right": 3, "questions": 10, "bits": 1.0, "known_lost": 2, "known_right_base": 23,
         "general": 3.75, "chats": 2.0, "prose": 4.0, "source": 5.25}  # fmt: skip
BASE = {"bits": 4.0, "general": 3.5, "chats": 2.5, "prose": 4.0, "source": 5.0}
LOOP = Cell("tiny-granite-h", "facts", 100, 8, 1e-3, "loop", 0.02)


def line(cell: Cell, **points: dict) -> dict:
    loop = {"held_out": 0.021, "lambda": 4.5, "at_bound": True}
    return {**asdict(cell), "at_base": BASE, "points": points, "loop": loop, "train_cpu_s": 12.4}


def test_a_row_is_what_the_run_measured():
    told = ["tiny-granite-h", "facts", "100", "0.001", "loop 2.0%", "3 of 10", "75.0%", "2.10%", "2 of 23", "+0.25",
            "-0.50", "+0.00", "+0.25", "12"]  # fmt: skip
    assert drift.row(line(LOOP, end=POINT), "end", POINT) == told


def test_what_is_held_is_told_over_the_budget_of_each_column_and_a_bound_is_marked():
    lines = [line(LOOP, end=POINT), line(Cell(*list(asdict(LOOP).values())[:6], 0.005), end=POINT)]
    lines.append(line(Cell(*list(asdict(LOOP).values())[:5], "ziegler", 0.02), end=POINT))
    table = drift.holds([*lines, line(Cell("smollm2", "facts", 100, 8, 1e-3, "plain"), end=POINT)])
    assert [column.header for column in table.columns][6:] == ["0.5%", "2.0%"]
    assert [list(column.cells) for column in table.columns[6:]] == [["4.20 (4.5!)", ""], ["1.05 (4.5!)"] * 2]


def test_a_curve_has_the_values_of_an_arm_or_the_way_of_a_plain_run():
    plain = Cell("tiny-granite-h", "facts", 100, 8, 1e-3, "plain")
    ways = {name: POINT | {"drift": drift} for name, drift in
            {"end": 0.5, "step 9": 0.6, "x 0.5": 0.2, "x 0.25": 0.05, "mean of 3": 0.3}.items()}  # fmt: skip
    loops = [line(Cell(*list(asdict(LOOP).values())[:6], value), end=POINT) for value in (0.1, 0.01)]
    found = {arm: points for (arm, _), points in curves([line(plain, **ways), *loops]).items()}
    drifts = {arm: [point["drift"] for _, point in points] for arm, points in found.items() if "plain" in arm}
    assert drifts == {"plain": [0.6, 0.5], "plain, scaled": [0.05, 0.2, 0.5], "plain, averaged": [0.3]}
    assert [each["value"] for each, _ in found["loop"]] == [0.01, 0.1]


def test_every_cell_has_a_name_of_its_own_and_is_known_again_in_its_line():
    assert len({str(cell) for cell in CELLS}) == len(CELLS)
    assert all(Cell.of(asdict(cell)) == cell for cell in CELLS)


def test_a_line_without_a_finished_run_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["drift.py", "--results", str(tmp_path / "none"), "--table", "holds"])
    assert exit_codes.exit_code_of(drift.main, False) == 2
    assert "no finished run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cell_is_trained_and_its_budget_held(tmp_path):
    from benchmarks.drift_training import run

    found = run(Cell("tiny-granite-h", "facts", 30, 8, 1e-3, "loop", 0.02), "tiny-granite-h", tmp_path)
    end = found["points"]["end"]
    assert end["bits"] < found["at_base"]["bits"]
    assert 0 < end["drift"] < 2 * 0.02  # quarters of the text differ
    assert found["loop"]["course"][-1][0] == found["steps"]
