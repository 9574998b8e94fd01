"""Does the runs of a plan that are not finished, several at a time."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from granite_scu.experiments.comparison.claims import Claims
from granite_scu.experiments.comparison.evidence import Spec
from granite_scu.experiments.comparison.plan import Plan
from granite_scu.experiments.comparison.pool import Finished, Pool
from granite_scu.experiments.comparison.protocol import STEPS

SECONDS_A_STEP = 0.35
"""Of a run with everything in it, until there are finished ones to go by: two cores, a thread each."""


@dataclass
class Outcome:
    """What a call has done.

    Attributes:
        done: runs that it finished.
        errors: those that broke, and why.
    """

    done: int = 0
    errors: list[Finished] = field(default_factory=list)


@dataclass(frozen=True)
class Standing:
    """How far a plan is.

    Attributes:
        total: runs, those that others hang on among them.
        finished: of these.
        seconds_each: estimated time of a run, on one core.
    """

    total: int
    finished: int
    seconds_each: float

    def remaining(self, jobs: int) -> float:
        """Seconds until all are finished."""
        return (self.total - self.finished) * self.seconds_each / jobs


def standing(plan: Plan) -> Standing:
    """Count a plan's runs. Cells that turn out to be one run count twice until that is known."""
    specs = plan.specs()
    keys = {spec.key for spec in specs if spec}
    unknown = sum(spec is None for spec in specs)
    finished = [plan.evidence.records[key] for key in keys if key in plan.evidence.records]
    times = [record["wall_time_s"] for record in finished if record.get("steps")]
    steps = max((task.steps or STEPS for task in plan.tasks), default=0)
    each = sum(times) / len(times) if times else SECONDS_A_STEP * steps
    return Standing(len(keys) + unknown, len(finished), each)


def cores() -> int:
    """Physical cores: two workers on one core would share its arithmetic units."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def carry_out(plan: Plan, jobs: int, console: Console, max_runs: int | None = None) -> Outcome:
    """Do what is not finished, in the plan's order, until nothing is left that can be done.

    Several processes may do this on one folder, on one machine or on several: each passes over what another one has
    under way, takes up what that has finished, and ends when all is.

    Args:
        plan: what is wanted.
        jobs: workers.
        console: for the progress.
        max_runs: stop after so many; None does all.
    """
    outcome = Outcome()
    folder = plan.evidence.folder
    with Claims(folder) as claims, Pool(jobs, folder) as pool, _progress(plan, jobs, console) as show:
        given: set[str] = set()
        while True:
            elsewhere = _start_runs(plan, pool, claims, given, math.inf if max_runs is None else max_runs)
            show(pool.busy, elsewhere)
            if not (pool.busy or elsewhere):
                return outcome
            for result in pool.finished(timeout=1.0):
                if result.error is None:
                    plan.evidence.add(folder / result.spec.file)
                    outcome.done += 1
                else:
                    outcome.errors.append(result)
                    console.print(f"failed: {result.spec.file.stem}: {_first_line(result.error)}", highlight=False)
                claims.release(result.spec)
            claims.renew()


def _start_runs(plan: Plan, pool: Pool, claims: Claims, given: set[str], most: float) -> list[Spec]:
    """Start runs while there is room, and note their keys in ``given``.

    Returns:
        Those that room was left for, and that another process has under way.
    """
    elsewhere: list[Spec] = []
    while pool.has_room and len(given) < most:
        spec = plan.next(busy=given | {spec.key for spec in elsewhere})
        if spec is None:
            return elsewhere
        if not claims.take(spec):
            elsewhere.append(spec)
        elif plan.evidence.look_for(spec):  # now, and not before: who finishes a run writes it, and then lets go
            claims.release(spec)
        else:
            given.add(spec.key)
            pool.start(spec)
    return []


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:300]


@contextmanager
def _progress(plan: Plan, jobs: int, console: Console) -> Iterator[Callable[[list[Spec], list[Spec]], None]]:
    """A bar on a terminal, a line for each change elsewhere."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    before = ""
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("")

        def show(busy: list[Spec], elsewhere: list[Spec]) -> None:
            nonlocal before
            names = ", ".join([spec.file.stem for spec in busy] + [f"{spec.file.stem} elsewhere" for spec in elsewhere])
            if names == before:
                return
            before = names
            now = standing(plan)
            left = f"{spoken(now.remaining(jobs))} left"
            progress.update(bar, total=now.total, completed=now.finished, description=f"{left}  {names}")
            if not console.is_terminal:
                clock = time.strftime("%H:%M:%S")
                console.print(f"{clock}  {now.finished}/{now.total}  {left}  running: {names or 'nothing'}")

        yield show


def spoken(seconds: float) -> str:
    """A duration for people.

    >>> spoken(30), spoken(600), spoken(9000)
    ('1 min', '10 min', '2.5 h')
    """
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
