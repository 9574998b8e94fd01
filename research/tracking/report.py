"""What ``research.tracking`` prints of its runs, and where those were done."""

import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from research.tracking.figures import EXCURSION, GOALS, meets_goals
from research.tracking.grid import TrackingCell

ORIGIN = ("machine", "versions", "git_revision")
"""What a run's file says of where it was done."""


def print_table(results: list[dict[str, Any]], console: Console) -> None:
    """A row for each run, and a line for each that failed."""
    table = Table(title="tracking: the smoothed S against S*, and the raw S in windows of ten ticks", padding=(0, 0))
    shares, numbers = (*GOALS, *EXCURSION, "in_band_early", "rise", "saturated"), ("iae", "travel", "lambda")
    for name in ("S*", "rate", "rank", "corpus", "seed", "disturbance", *shares, *numbers, "goals"):
        table.add_column({"in_band_early": "early", "lambda": "last lambda", "iae": "IAE"}.get(name, name))
    for r in results:
        cell = TrackingCell.of(r)
        what = f"{cell.setpoint:.2%}", f"{cell.learning_rate:g}", str(cell.rank), cell.corpus, str(cell.seed)
        figures = *(_percent(r[name]) for name in shares), *(_number(r[name]) for name in numbers)
        outcome = "failed" if r["failed"] else "met" if meets_goals(r) else "missed"
        table.add_row(*what, cell.disturbance or "", *figures, outcome)
    console.print(table)
    for r in results:
        if r["failed"]:
            console.print(line(r), highlight=False)


def line(result: dict[str, Any]) -> str:
    """A run in a line: whether it met its goals, and its figures, or why it failed."""
    if result["failed"]:
        return f"failed {TrackingCell.of(result)}: {result['failed']}"
    mark = "ok    " if meets_goals(result) else "missed"
    return f"{mark} {TrackingCell.of(result)}: " + ", ".join(f"{n} {_percent(result[n])}" for n in (*GOALS, *EXCURSION))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def origins(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many runs are of which machine, versions and revision; None where a file is older than their recording."""
    counted = Counter(json.dumps({name: r.get(name) for name in ORIGIN}, sort_keys=True) for r in results)
    return [{"runs": runs, **json.loads(facts)} for facts, runs in counted.items()]


def describe_origin(origin: dict[str, Any]) -> str:
    """One of ``origins`` in words."""
    runs = "1 run" if origin["runs"] == 1 else f"{origin['runs']} runs"
    machine, versions, revision = (origin[name] for name in ORIGIN)
    if machine is None:
        return f"{runs}: machine, versions and revision not recorded"
    where = f"{machine['cpu']}, {machine['cores']} cores, threads of a run: {machine['threads']}"
    return f"{runs}: {where}, torch {versions['torch']}, revision {revision or 'unknown'}"
