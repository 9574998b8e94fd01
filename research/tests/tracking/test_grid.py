from dataclasses import replace

import pytest
from tracked import CELL, stored_runs

from granite_scu.control import build
from research.comparison import evidence
from research.tracking import grid as tracking_grid
from research.tracking.command import LAWS
from research.tracking.grid import grid, quick


def test_the_grid_has_every_combination_once_and_its_first_half_is_balanced():
    setpoints, corpora = list(tracking_grid.SETPOINTS), list(tracking_grid.CORPORA)
    cells = grid(setpoints, corpora, 3, "pi", [])
    assert len(set(cells)) == len(cells)
    plain = [cell for cell in cells if not cell.disturbance]
    assert len(plain) == 3 * 4 * 2 * 2 * 2
    assert max(setpoints) / min(setpoints) > 100 and tracking_grid.RATES[1] / tracking_grid.RATES[0] == pytest.approx(3)
    assert {cell.disturbance for cell in cells} == {None, *tracking_grid.DISTURBANCES}
    first = cells[: len(plain) // 6]
    for pair in ("learning_rate", "rank"), ("rank", "corpus"), ("learning_rate", "corpus"):
        counts = [tuple(getattr(cell, name) for name in pair) for cell in first]
        assert {counts.count(seen) for seen in counts} == {4}
    few = quick(setpoints, corpora, "pi", [])
    assert {cell.setpoint for cell in few} == set(setpoints)
    assert {cell.rank for cell in few} == set(tracking_grid.RANKS) and {cell.corpus for cell in few} == set(corpora)


def test_a_setpoint_is_moved_only_to_where_there_can_be_one():
    cells = grid([0.1, 0.66, 0.67, 2 / 3, 0.9, 0.95], ["stdlib-docs"], 1, "pi", [])
    upward = {cell.setpoint for cell in cells if cell.disturbance == "S* x1.5"}
    assert upward == {0.66}
    for disturbance in set(tracking_grid.DISTURBANCES) - {"S* x1.5"}:
        assert {c.setpoint for c in cells if c.disturbance == disturbance} == {0.66, 0.67, 2 / 3, 0.9}
    for cell in cells:  # as the run itself moves it
        replace(build("pi", setpoint=cell.setpoint), setpoint=tracking_grid.moved(cell.setpoint, cell.disturbance))
    assert tracking_grid.left_out([0.8]) == ["S* x1.5 is left out at S* = 0.8: 1.2 is no setpoint, it must be below 1"]
    assert not tracking_grid.left_out(list(tracking_grid.SETPOINTS))


def test_a_finished_cell_is_known_by_its_settings_and_the_laws_own():
    assert CELL.key() == replace(CELL).key()
    others = replace(CELL, seed=1), replace(CELL, controller="original"), replace(CELL, settings=("--kp=2",))
    assert len({CELL.key(), *(cell.key() for cell in others)}) == 4


def test_finished_runs_keep_their_names():
    """Of a law that stays as it was published, so that its own settings are not what changes the name."""
    cell = quick(list(tracking_grid.SETPOINTS), list(tracking_grid.CORPORA), "original", [])[0]
    assert cell.key() == "9f0065fbce415ed6"
    assert cell.key() in {run.key for run in stored_runs()}


def test_a_run_of_an_earlier_training_is_not_reported(monkeypatch):
    before = [replace(CELL, controller=law).key() for law in LAWS]
    monkeypatch.setattr(evidence, "VERSION", evidence.VERSION + 1)
    assert not {replace(CELL, controller=law).key() for law in LAWS} & {*before}
