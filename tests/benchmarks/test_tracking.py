import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import tracking
from benchmarks.tracking import EVERY, STEPS, Cell, grid, measure, meets_goals, quick, summarise

ROOT = Path(__file__).parents[2]
CELL = Cell(0.1, 1e-3, 16, "stdlib-docs", 0)


def history(ratio, target: float = 0.1) -> list[dict]:
    """A run whose smoothed and raw S are ``ratio(step)`` times the setpoint."""
    return [
        {"step": step, "s": target * ratio(step), "s_ema": target * ratio(step), "s_target": target,
         "lambda": 1.0, "saturated": False, "held": False}
        for step in range(EVERY, STEPS + 1, EVERY)
    ]  # fmt: skip


def result(cell: Cell, ratio) -> dict:
    return {"cell": vars(cell), **measure(cell, history(ratio))}


def test_a_run_is_measured_by_hand_arithmetic():
    """Up to 1.2 at a tenth of the run, in band from a fifth on, but for one tick in the second half at 0.85."""

    def ratio(step: int) -> float:
        if step <= STEPS // 10:
            return 1.2 * step / (STEPS // 10)
        return 1.15 if step < STEPS // 5 else 0.85 if step == STEPS // 2 else 1.05

    figures = measure(CELL, history(ratio))
    counted = STEPS * 4 // 5 // EVERY + 1 - 10  # the ten ticks that qualify are not
    assert figures["settling"] == 0.2
    assert figures["in_band"] == pytest.approx(1 - 1 / counted)
    assert figures["overshoot"] == pytest.approx(0.2)
    assert figures["raw"] == pytest.approx(0.05)  # ten ticks with the odd one among them have a mean of 1.03
    assert not meets_goals({**figures, "cell": vars(CELL)})


def test_passing_through_the_band_is_not_settling():
    figures = measure(CELL, history(lambda step: 1 + 0.5 * math.sin(step / 30)))
    assert figures["settling"] is None
    assert not meets_goals(figures)


def test_a_disturbance_is_judged_by_the_way_back():
    disturbed = replace(CELL, disturbance="learning rate x3")
    back = STEPS // 2 + 5 * EVERY
    figures = measure(disturbed, history(lambda step: 1.5 if STEPS // 2 < step < back else 1.0))
    assert figures["recovery"] == pytest.approx(5 * EVERY / STEPS)
    assert figures["overshoot"] == 0.0  # of the half before it
    assert meets_goals(figures)
    lost = measure(disturbed, history(lambda step: 1.5 if step > STEPS // 2 else 1.0))
    assert lost["recovery"] == 1.0
    assert not meets_goals(lost)


def test_the_summary_is_the_worst_of_each():
    good, bad = result(CELL, lambda step: 1.0), result(replace(CELL, seed=1), lambda step: 0.5)
    facts = summarise([good, bad])
    assert facts["worst_in_band"] == 0.0
    assert facts["worst_settling"] == 1.0
    assert not facts["goal_met"]
    assert facts["missed"] == [str(replace(CELL, seed=1))]
    assert summarise([good])["goal_met"]


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


def test_a_finished_cell_is_known_by_its_settings_and_the_laws_own():
    assert CELL.key() == replace(CELL).key()
    others = replace(CELL, seed=1), replace(CELL, controller="original"), replace(CELL, settings=("--kp=2",))
    assert len({CELL.key(), *(cell.key() for cell in others)}) == 4


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
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said):
    ran = subprocess.run(
        [sys.executable, "benchmarks/tracking.py", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and said in ran.stderr


def test_only_laws_that_heed_a_setpoint_can_be_measured(capsys):
    with pytest.raises(SystemExit):
        tracking.build_parser().parse_args(["--controller", "fixed"])
    assert "'fixed'" in capsys.readouterr().err


def test_finished_runs_are_read_and_reported_as_json(tmp_path):
    cells = quick([0.1], ["stdlib-docs"], "pi", [])
    for cell in dict.fromkeys(cells):
        path = tmp_path / f"{cell.key()}.json"
        path.write_text(json.dumps({**result(cell, lambda step: 1.0), "trajectory": [[10, 0.1, 0.1, 1.0, 0.1]]}))
    ran = subprocess.run(
        [sys.executable, "benchmarks/tracking.py", "--quick", "--json", "--target-s", "0.1", "--max-runs", "0",
         "--data-dir", "stdlib-docs", "--results", str(tmp_path), "--plot", str(tmp_path / "tracking")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(ran.stdout)
    assert facts["goal_met"] and facts["worst_in_band"] == 1.0 and facts["worst_settling"] == EVERY / (STEPS // 2)
    assert (tmp_path / "tracking.png").stat().st_size > 1000


@pytest.mark.slow
def test_an_interrupt_leaves_neither_a_process_nor_a_half_run(tmp_path):
    command = [sys.executable, "benchmarks/tracking.py", "--jobs", "2", "--results", str(tmp_path / "results")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stderr=subprocess.PIPE)
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


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
