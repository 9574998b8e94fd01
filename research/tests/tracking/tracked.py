"""Runs of ``research.tracking`` that nothing was trained for, and the command in this process."""

import argparse
import json
import sys
from pathlib import Path

from granite_scu.cli import exit_codes
from research.run_store import FinishedRun, RunStore
from research.tracking import command as tracking
from research.tracking.figures import measure
from research.tracking.grid import EVERY, STEPS, TrackingCell, quick
from research.tracking.runs import trajectory_of

ROOT = Path(__file__).parents[3]
CELL = TrackingCell(0.1, 1e-3, 16, "stdlib-docs", 0)
QUICK = ("--quick", "--target-s", "0.1", "--max-runs", "0", "--data-dir", "stdlib-docs")
"""Asks for what ``keep_quick_runs`` keeps, and trains nothing."""


def history(ratio, target: float = 0.1, steps: int = STEPS) -> list[dict]:
    """A run whose raw S is ``ratio(step)`` times the setpoint. The law's own filter shows nothing of it."""
    return [
        {"step": step, "s": target * ratio(step), "s_ema": target, "s_target": target,
         "lambda": 1.0, "saturated": False, "held": False}
        for step in range(EVERY, steps + 1, EVERY)
    ]  # fmt: skip


def result(cell: TrackingCell, ratio) -> dict:
    records = history(ratio, steps=cell.steps)
    figures = measure(cell, records)
    return {"cell": vars(cell), "failed": None, **figures, "trajectory": trajectory_of(records)}


def keep_quick_runs(folder: Path, but_for: tuple[str, ...] = ()) -> list[Path]:
    """The runs of ``QUICK`` as files, without some of their entries."""
    paths = []
    for cell in dict.fromkeys(quick([0.1], ["stdlib-docs"], "pi", [])):
        done = result(cell, lambda step: 1.0 if step != STEPS // 2 - EVERY else 1.2)
        kept = {name: value for name, value in done.items() if name not in but_for}
        paths.append(folder / f"{cell.key()}.json")
        paths[-1].write_text(json.dumps(kept))
    return paths


def stored_runs() -> list[FinishedRun]:
    """Those that the repository publishes."""
    return list(RunStore("--results", ROOT / "research" / "evidence" / "tracking" / "runs").read())


def asked(*arguments: str) -> argparse.Namespace:
    return tracking.build_parser().parse_args(arguments)


def guarded(monkeypatch, *arguments: str) -> int:
    """The exit code of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["tracking.py", *arguments])
    return exit_codes.exit_code_of(tracking.main, False)
