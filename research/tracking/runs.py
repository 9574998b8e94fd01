"""The runs of ``research.tracking``: done in worker processes, kept as a file each, and read back."""

import math
import tempfile
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from granite_scu.cli import exit_codes
from granite_scu.config.errors import Diverged, UserError
from granite_scu.config.settings import ControlConfig
from granite_scu.storage import provenance
from research.run_store import FinishedRun, RunStore, origin, write_record
from research.tracking.figures import GOALS, measure, nothing_held
from research.tracking.grid import TrackingCell
from research.tracking.report import describe_origin, line, origins
from research.tracking.training import request_of, train
from research.workers import workers

COURSE = ("s", "s_ema", "lambda", "s_target", "saturated")
"""What a trajectory has of each tick, after its step."""


def run_cell(cell: TrackingCell, scratch: Path | None = None) -> dict[str, Any]:
    """Train the cell, in a folder that is made in ``scratch`` and removed, and measure it."""
    provenance.git_revision()  # remembered from now on: what runs is what is imported now
    try:
        trajectory = trajectory_of(train(cell, scratch))
        figures = {"failed": None, **measure(cell, course(cell, trajectory)), "trajectory": trajectory}
    except Diverged as error:
        figures = {"failed": str(error), **nothing_held(cell), "trajectory": []}
    return {"cell": asdict(cell), **figures, **origin()}


def trajectory_of(history: list[dict[str, Any]]) -> list[list[float | bool | None]]:
    """Each tick's step and ``COURSE``, in four digits."""

    def short(value: float | bool | None) -> float | bool | None:
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return [[record["step"], *(short(record[name]) for name in COURSE)] for record in history]


def course(cell: TrackingCell, trajectory: list[list[float | bool | None]]) -> list[dict[str, Any]]:
    """The records of a trajectory. In those of older files no tick is marked saturated; it is where lambda is a bound.

    Raises:
        ValueError: a tick is not whole.
    """
    given = dict(setting.partition("=")[::2] for setting in cell.settings)
    given = {name.rpartition(".")[2].strip("-").replace("-", "_"): value for name, value in given.items()}
    low, high = (float(given.get(name, getattr(ControlConfig, name))) for name in ("lambda_min", "lambda_max"))
    with_marks = [point if len(point) > len(COURSE) else [*point, not low < point[3] < high] for point in trajectory]
    return [dict(zip(("step", *COURSE), point, strict=True)) for point in with_marks]


def read_run(run: FinishedRun, cell: TrackingCell) -> dict[str, Any]:
    """The finished run of a cell, measured from its trajectory: its record may be older than a figure.

    Raises:
        UserError: the record is not whole, or of something else.
    """
    try:
        result = {name: value for name, value in run.record.items() if name != "key"}
        if TrackingCell.of(result) != cell or not {*GOALS, "lambda", "trajectory"} <= result.keys():
            raise ValueError("of another run, or without its figures")
        describe_origin(*origins([result]))
        if result.setdefault("failed", None):
            result |= nothing_held(cell)
        else:
            records = course(cell, result["trajectory"])
            _require_whole(cell, records)
            result |= measure(cell, records)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        remedy = "move it away, and the run is done again"
        raise UserError(f"--results: {run.place} is not the record of {cell}, or not all of it; {remedy}") from error
    return result


def _require_whole(cell: TrackingCell, records: list[dict[str, Any]]) -> None:
    """Refuse a trajectory that does not lead to the run's end, or has what no run has.

    Raises:
        ValueError: it is such a one.
    """
    steps = [record["step"] for record in records]
    if steps != sorted(set(steps)) or steps[-1:] != [cell.steps]:
        raise ValueError("its steps do not lead to the end of the run")
    shares = [record[name] for record in records for name in ("s", "s_target") if record[name] is not None]
    if not all(0 <= share <= 1 for share in shares) or not all(0 <= r["lambda"] < math.inf for r in records):
        raise ValueError("S or lambda are what they cannot be")


def run_all(
    cells: list[TrackingCell], jobs: int, results: Path | None, at_most: int | None, console: Console
) -> list[dict[str, Any]]:
    """The finished cells, in order: those read from ``results``, and ``at_most`` so many new ones, kept there.

    Raises:
        UserError: a record in ``results`` is not the run's, or a cell's settings or its run are refused.
    """
    store = RunStore("--results", results) if results else None
    runs = {run.key: run for run in store.read()} if store else {}
    found = {cell: read_run(runs[key], cell) for cell in cells if (key := cell.key()) in runs}
    if store and at_most != 0:
        store.collect()  # what an earlier command left that was interrupted
    missing = [cell for cell in cells if cell not in found][:at_most]
    for cell in {(cell.controller, cell.settings): cell for cell in missing if cell.settings}.values():
        request_of(cell, "unused")  # here: a wrong setting is refused before any run starts
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with (
        Progress(*columns, console=console) as progress,
        tempfile.TemporaryDirectory() as scratch,
        workers(min(jobs, len(missing) or 1), exit_codes.silence_rename_warnings) as pool,
    ):
        task = progress.add_task("runs", total=len(found) + len(missing), completed=len(found))
        pending = {pool.submit(run_cell, cell, Path(scratch)): cell for cell in missing}
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            # One that failed ends the grid, so those that ended with it are kept first.
            for future in sorted(done, key=lambda one: one.exception() is not None):
                cell, result = pending.pop(future), future.result()
                found[cell] = result
                if results:
                    write_record(results / f"{cell.key()}.json", result)
                progress.console.print(line(result), highlight=False)
                progress.advance(task)
    if store and at_most != 0:
        store.collect()
    return [found[cell] for cell in cells if cell in found]
