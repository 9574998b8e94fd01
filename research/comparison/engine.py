"""Does the runs of a plan that are not finished, several at a time."""

import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from granite_scu.config.errors import RunFailed, UserError
from research.comparison.evidence import Spec
from research.comparison.plan import Plan
from research.comparison.protocol import STEPS
from research.workers import workers

SECONDS_A_STEP = 0.35
"""Of a run with everything in it, until there are finished ones to go by: two cores, a thread each."""


class Shard(NamedTuple):
    """The share of the runs that one of several commands does: of every run exactly one of them.

    Attributes:
        index: of this command, from 1 on.
        count: of all commands.
    """

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """``i/n``. Raises UserError where it is something else."""
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise UserError(f"--shard {text}: must be i/n, a whole number from 1 to n and n, as 1/4")
        return cls(int(index), int(count))

    def has(self, spec: Spec) -> bool:
        """Whether the run is of this share. A run's key is as good as drawn, so shares are about equally large."""
        return int(spec.key, 16) % self.count == self.index - 1


def standing(plan: Plan) -> tuple[int, int, float]:
    """How many of a plan's runs are finished, how many there are, and the estimated seconds of one on a core.

    Cells that turn out to be one run count twice until that is known.
    """
    specs = plan.specs()
    keys = {spec.key for spec in specs if spec}
    finished = [plan.evidence.records[key] for key in keys if key in plan.evidence.records]
    times = [record["wall_time_s"] for record in finished if record.get("steps")]
    steps = max((task.steps or STEPS for task in plan.tasks), default=0)
    each = sum(times) / len(times) if times else SECONDS_A_STEP * steps
    return len(finished), len(keys) + specs.count(None), each


def cores() -> int:
    """Physical cores: two workers on one core would share its arithmetic units."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def carry_out(
    plan: Plan,
    jobs: int,
    console: Console,
    initializer: Callable[[], None],
    max_runs: int | None = None,
    shard: Shard = Shard(),  # noqa: B008 (immutable)
    run: Callable[[Spec, Path, Path], dict | str] | None = None,
) -> tuple[int, dict[str, str]]:
    """Do what is not finished, in the plan's order, until nothing is left that can be done.

    A finished run is a file until this call ends, and then a line: whatever ends it loses only the runs under way.

    Args:
        plan: what is wanted.
        jobs: runs at a time, each in a process of one thread.
        console: for the progress.
        initializer: is called in each process first.
        max_runs: stop after so many; None does all.
        shard: of the runs that this call does.
        run: does one, in a process; ``do_run`` unless given.

    Returns:
        How many unfinished runs are of other shards, for which more of this one may wait, and why runs broke, by name.
    """
    folder = plan.evidence.folder
    given: set[str] = set()
    errors: dict[str, str] = {}

    def take() -> Spec | None:
        if max_runs is not None and len(given) >= max_runs:
            return None
        spec = plan.next(lambda spec: spec.key in given or not shard.has(spec))
        given.update({spec.key} if spec else ())
        return spec

    def keep(spec: Spec, result: dict | str) -> None:
        if isinstance(result, dict):
            plan.evidence.add(result, str(folder / spec.file))
        else:
            errors[spec.file.stem] = result
            console.print(f"failed: {spec.file.stem}: {result.strip().splitlines()[0][:300]}", highlight=False)

    plan.evidence.store.collect()  # what an earlier command left that was interrupted
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        TemporaryDirectory(prefix="granite-scu-runs-") as scratch,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        show = partial(_show, progress, progress.add_task(""), plan, jobs)
        do = partial(_do_runs, run or do_run, (folder, Path(scratch)), keep)
        while lost := do(workers(jobs, initializer), jobs, take, show):
            for spec in lost:  # one after the other: the run that is to blame takes no other with it again
                if do(workers(1, initializer), 1, partial(next, iter([spec]), None)):
                    keep(spec, "its process was killed twice; out of memory?")
    plan.evidence.store.collect()
    return len({spec.key for spec in plan.open_runs() if not shard.has(spec)}), errors


def _do_runs(
    run: Callable[[Spec, Path, Path], dict | str],
    places: tuple[Path, Path],
    keep: Callable[[Spec, dict | str], None],
    processes: AbstractContextManager[ProcessPoolExecutor],
    jobs: int,
    take: Callable[[], Spec | None],
    show: Callable[[list[Spec]], None] = lambda busy: None,
) -> list[Spec]:
    """Do runs while there are any to take; returns those that were under way when a worker was killed."""
    busy: list[Spec] = []
    futures: dict[Future, Spec] = {}
    with processes as pool:
        try:
            while True:
                while len(busy) < jobs and (spec := take()):
                    busy.append(spec)
                    futures[pool.submit(run, spec, *places)] = spec
                show(busy)
                if not busy:
                    return []
                for future in wait(futures, return_when=FIRST_COMPLETED).done:
                    keep(futures[future], future.result())
                    busy.remove(futures.pop(future))
        except BrokenProcessPool:
            for future in wait(futures).done:
                if future.exception() is None:
                    keep(futures[future], future.result())
                    busy.remove(futures[future])
            return busy


def _show(progress: Progress, bar: TaskID, plan: Plan, jobs: int, busy: list[Spec]) -> None:
    """A bar on a terminal, a line for each change elsewhere."""
    names = ", ".join(spec.file.stem for spec in busy)
    finished, total, each = standing(plan)
    left = f"{format_duration((total - finished) * each / jobs)} left"
    progress.update(bar, total=total, completed=finished, description=f"{left}  {names}")
    if not progress.console.is_terminal:
        clock = time.strftime("%H:%M:%S")
        progress.console.print(f"{clock}  {finished}/{total}  {left}  running: {names or 'nothing'}")


def do_run(spec: Spec, evidence: Path, scratch: Path) -> dict | str:
    """Do a run and write its record into the evidence folder; returns the record, or what went wrong."""
    from research.comparison.runs import carry_out  # late: it loads torch, for the workers alone

    try:
        return carry_out(spec, evidence, scratch)
    except (UserError, RunFailed) as error:
        return str(error)
    except Exception as error:
        # The boundary of a run: the others continue, and the command reports it at its end.
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def format_duration(seconds: float) -> str:
    """A duration for people.

    >>> format_duration(30), format_duration(600), format_duration(9000)
    ('1 min', '10 min', '2.5 h')
    """
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
