#!/usr/bin/env python3
"""How well S is held: real training on the embedded model over a grid of setpoints, rates, ranks, corpora and seeds.

    python benchmarks/tracking.py --quick            four cells, five to eight minutes on two cores
    python benchmarks/tracking.py --json > out.json  the whole grid, some eight hours; --results makes it resumable
    python benchmarks/tracking.py --data-dir my_texts/ --target-s 0.03   your text, your setpoint

One set of gains throughout. Each run is what a user would start with --no-isolate-documents, which is not the product's
default but how the published grid was measured; --set isolate_documents runs it with the default. It has 1400 optimizer
steps of 1024 tokens (half of them with --quick), a tick every 10, N = 24 576 tokens and a cosine schedule, in a process
with one thread. A disturbance that would move S* to 1 or beyond is left out, and named. Smoothed is S by one filter for
all laws and settings, that of the product's defaults, whatever a law acts on itself. A tick without a usable S is out
of band and otherwise passed over; travel and saturated are of lambda, and count every tick. What is reported:

settling    share of the run before the smoothed S has entered +-10 % of S*, for nine of the next ten ticks
in band     share of ticks at which the smoothed S is in +-10 % of S*, from the eleventh after that on
raw         largest |mean of the raw S over ten ticks / S* - 1| from there on
overshoot   peak of the smoothed S over S*, minus 1

and, after a disturbance at mid-run,

recovery    share of the run until S is back in band, in the same sense
peak, dip   largest and smallest smoothed S over the setpoint in force, minus 1; where the setpoint was moved, only
            what lies beyond the new one: before it is the way that S has to go

In band and raw are then the worse of before and after, settling and overshoot those before. Without a goal are peak and
dip, and what a run reports of itself (``granite_scu.control.metrics``):

early       in band, over the first 80 % of the run's steps: later the learning rate, and with it S, hardly moves
rise        share of the run until the smoothed S has first reached 90 % of S*
IAE         |ln(smoothed S / S*)|, averaged over the run
travel      sum of |change of ln lambda| over the run
saturated   share of ticks that leave lambda on a bound

A run that diverges is recorded with the reason and misses every goal. Exit code 1 when a cell misses a goal, 0 when no
finished one does: of a part of the grid, "goal_met" is then null and "complete" false.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from granite_scu import guard, provenance
from granite_scu.comparison import evidence
from granite_scu.config import ControlConfig
from granite_scu.control import CONTROLLERS, PI, TRACKING, metrics
from granite_scu.control.filter import smooth
from granite_scu.data import files, hub, sources
from granite_scu.data.corpora import EMBEDDED
from granite_scu.errors import Diverged, UserError
from granite_scu.parser import Parser

STEPS, EVERY, TOKENS = 1400, 10, 24_576
SETPOINTS = (0.004, 0.02, 0.1, 0.5)
RATES = (6e-4, 1.8e-3)
RANKS = (16, 8)
CORPORA = ("stdlib-docs", "stdlib-source")
DISTURBANCES = ("learning rate x3", "corpus switched", "S* x1.5", "S* /1.5")
BAND = 0.1
GOALS = {"in_band": 0.9, "settling": 0.15, "overshoot": 0.25, "raw": 0.15, "recovery": 0.15}
EXCURSION = ("peak", "dip")
EARLY = 0.8
WORST = {
    "in_band": (min, 0.0),
    "settling": (max, 1.0),
    "overshoot": (max, None),
    "raw": (max, 1.0),
    "recovery": (max, None),
    "peak": (max, None),
    "dip": (min, None),
    "in_band_early": (min, 0.0),
    "rise": (max, 1.0),
    "iae": (max, None),
    "travel": (max, None),
    "saturated": (max, None),
}
"""Of each figure which is the worst, and what a run without it counts as; None: it does not count."""
COURSE = ("s", "s_ema", "lambda", "s_target", "saturated")
ORIGIN = ("machine", "versions", "git_revision")
FIRST_VERSION = 2
"""The ``evidence.VERSION`` that runs stand for in whose names there is none."""
EXAMPLE = "kp=2 ki=0.3 isolate_documents"


@dataclass(frozen=True)
class Cell:
    """One run of the grid; ``content`` is the ``digest`` of a text of the user's own."""

    setpoint: float
    learning_rate: float
    rank: int
    corpus: str
    seed: int
    disturbance: str | None = None
    controller: str = "pi"
    settings: tuple[str, ...] = ()
    steps: int = STEPS
    content: str = ""

    @classmethod
    def of(cls, result: dict[str, Any]) -> "Cell":
        """The cell of a run, in whose file a tuple is a list."""
        return cls(**{**result["cell"], "settings": tuple(result["cell"]["settings"])})

    def key(self) -> str:
        """Names the finished run; it changes with the law's defaults and code, and with a text of the user's own."""
        law = {field.name: field.default for field in fields(CONTROLLERS[self.controller])}
        law = {name: str(default) for name, default in law.items() if default is not MISSING}
        # Without a content that is "", as those runs are named that were finished before it was part of the name.
        own = {name: value for name, value in asdict(self).items() if name != "content" or value}
        code = evidence.revisions(self.controller)
        if evidence.VERSION != FIRST_VERSION:
            code["every law"] = evidence.VERSION
        # The code, too, is only in the names of runs of a later one.
        described = json.dumps([own, law, EVERY, TOKENS, *([code] if code else [])], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        name = f"{self.setpoint:.2%} rate {self.learning_rate:g} rank {self.rank} {self.corpus} seed {self.seed}"
        return f"{name}, {self.disturbance}" if self.disturbance else name


def digest(corpus: str) -> str:
    """Stands for what the files of a text hold, so that an edited one is trained on anew; "" for a corpus with a name.

    Raises:
        UserError: there is nothing there, or nothing that can be read.
    """
    if corpus in EMBEDDED or hub.is_on_hub(corpus):
        return ""
    whole = hashlib.sha256()
    for path in sources.readable_files(corpus):
        of_file = hashlib.sha256()
        with files.opened(path, as_it_is=True) as stream:
            while piece := stream.read(files.PIECE):
                of_file.update(piece)
        whole.update(os.fsencode(path) + f"\0{of_file.hexdigest()}\0".encode())
    return whole.hexdigest()[:16]


def grid(setpoints: list[float], corpora: list[str], seeds: int, controller: str, settings: list[str]) -> list[Cell]:
    """Every combination, and at the middle setpoints each disturbance that there can be.

    In the order of doing, so that a part of it is balanced: of each seed first the half in which every two of rate,
    rank and corpus occur together once, then the disturbances, then the other half.
    """
    common = {"controller": controller, "settings": tuple(settings)}
    cells = []
    for seed in range(seeds):
        halves: tuple[list[Cell], list[Cell]] = ([], [])
        for (i, rate), (j, rank), (k, corpus) in product(enumerate(RATES), enumerate(RANKS), enumerate(corpora)):
            halves[(i + j + k) % 2].extend(Cell(s, rate, rank, corpus, seed, **common) for s in setpoints)
        disturbed = [
            Cell(s, 6e-4, 16, corpora[0], seed, d, **common)
            for s, d in product(_middle(setpoints), DISTURBANCES)
            if moved(s, d) < 1
        ]
        cells += halves[1] + disturbed + halves[0]
    return cells


def _middle(setpoints: list[float]) -> list[float]:
    return setpoints[1:-1] or setpoints


def moved(setpoint: float, disturbance: str | None) -> float:
    """Where a disturbance moves the setpoint to: above 1, where no S can be, from two thirds on."""
    return setpoint * {"S* x1.5": 1.5, "S* /1.5": 1 / 1.5}.get(disturbance or "", 1.0)


def left_out(setpoints: list[float]) -> list[str]:
    """What ``grid`` leaves out for want of a setpoint to move to, in words."""
    return [
        f"{d} is left out at S* = {s:g}: {moved(s, d):.4g} is no setpoint, it must be below 1"
        for s, d in product(_middle(setpoints), DISTURBANCES)
        if moved(s, d) >= 1
    ]


def quick(setpoints: list[float], corpora: list[str], controller: str, settings: list[str]) -> list[Cell]:
    """Few cells across the grid, and one disturbance; half the steps at the double rate, so S comes as far."""
    common = {"controller": controller, "settings": tuple(settings), "steps": STEPS // 2}
    low, high, middle = setpoints[0], setpoints[-1], setpoints[len(setpoints) // 2]
    lower = setpoints[len(setpoints) // 3]
    return [
        Cell(low, 2 * RATES[0], 16, corpora[0], 0, **common),
        Cell(high, RATES[1], 8, corpora[-1], 0, **common),
        Cell(lower, RATES[1], 8, corpora[0], 1, **common),
        Cell(middle, 2 * RATES[0], 16, corpora[0], 0, DISTURBANCES[0], **common),
    ]


def run_cell(cell: Cell, scratch: Path | None = None) -> dict[str, Any]:
    """Train the cell, in a folder that is made in ``scratch`` and removed, and measure it."""
    provenance.git_revision()  # remembered from now on: what runs is what is imported now
    try:
        trajectory = _trajectory(train(cell, scratch))
        figures = {"failed": None, **measure(cell, course(cell, trajectory)), "trajectory": trajectory}
    except Diverged as error:
        figures = {"failed": str(error), **nothing_held(cell), "trajectory": []}
    return {"cell": asdict(cell), **figures, **provenance.origin()}


def train(cell: Cell, scratch: Path | None = None) -> list[dict[str, Any]]:
    """The run's history. The run is a user's, but for the callback that disturbs it."""
    import torch

    from granite_scu import cli
    from granite_scu.run import Run

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        request = request_of(cell, folder)
        console = Console(quiet=True)
        cli.quiet(console)
        if cell.disturbance:
            request = replace(request, trainer={**request.trainer, "callbacks": [_disturbance(cell, request)]})
        run = Run(request, console)
        run.fit()
        return json.loads((run.folder.path / "scu_history.json").read_text(encoding="utf-8"))


def request_of(cell: Cell, folder: str) -> Any:
    """What a user would ask for to have the run in that folder. Makes nothing there.

    Raises:
        UserError: no run can be made of the cell's settings, or they change what the grid varies or counts on.
    """
    from granite_scu import flags

    arguments, _ = flags.translate(
        [
            "--test-run", "--output-dir", folder, "--data-dir", cell.corpus, "--data.train_tokens", str(TOKENS),
            "--max-steps", str(cell.steps), "--no-isolate-documents",  # as the published grid was measured
            "--warmup-steps", "20", "--eval-steps", str(cell.steps), "--control-every", str(EVERY),
            "--learning-rate", str(cell.learning_rate), "--lora-r", str(cell.rank),
            "--lora-alpha", str(2 * cell.rank), "--seed", str(cell.seed),
            "--controller", cell.controller, "--target-s", str(cell.setpoint), *cell.settings,
        ],
        ROOT / "configs" / "tiny.yaml",
    )  # fmt: skip
    from granite_scu import cli, steering  # late: a wrong flag is refused before torch is imported

    request = cli.parse(arguments).request
    settled = {
        "--output-dir": (request.run.output_dir, folder),
        "--data-dir": (request.data.path, cell.corpus),
        "--max-steps": (request.trainer["max_steps"], cell.steps),
        "--control-every": (request.control.every, EVERY),
        "--learning-rate": (request.optimizer.learning_rate, cell.learning_rate),
        "--lora-r": (request.lora.rank, cell.rank),
        "--seed": (request.seed, cell.seed),
        "--controller": (request.control.controller, cell.controller),
        "--target-s": (request.control.target_s, cell.setpoint),
    }
    for flag, (found, ours) in settled.items():
        if found != ours:
            raise UserError(f"--set: {flag} is the grid's own; leave it out")
    steering.build_controller(request.control)  # for the law's own refusals
    return request


def _disturbance(cell: Cell, request: Any) -> Any:
    """A callback that disturbs the run once, at its middle."""
    import lightning as L

    from granite_scu.callbacks.scu import ShannonControl
    from granite_scu.data.module import TextDataModule
    from granite_scu.model import loading

    class Disturbance(L.Callback):
        others = None

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if cell.disturbance == "corpus switched":
                corpus = CORPORA[cell.corpus == CORPORA[0]]
                data = TextDataModule(replace(request.data, path=corpus), request.seed)
                data.prepare(loading.load_tokenizer(request.base.name))
                self.others = iter(data.train_dataloader())

        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: dict, index: int) -> None:
            if self.others is not None and index >= cell.steps // 2:
                for name, tensor in next(self.others).items():
                    batch[name].copy_(tensor)
            if index != cell.steps // 2:
                return
            if cell.disturbance == "learning rate x3":
                scheduler = trainer.lr_scheduler_configs[0].scheduler
                scheduler.base_lrs = [3 * rate for rate in scheduler.base_lrs]
                for group in trainer.optimizers[0].param_groups:
                    group["lr"] *= 3
            elif cell.disturbance.startswith("S*"):
                control = next(c for c in trainer.callbacks if isinstance(c, ShannonControl))
                control.controller = replace(control.controller, setpoint=moved(cell.setpoint, cell.disturbance))

    return Disturbance()


def measure(cell: Cell, history: list[dict[str, Any]]) -> dict[str, float | None]:
    """The figures of a run; None where S never settled, and where the question does not arise."""
    records = smoothed(history)
    control = metrics.summarise(records, BAND)
    whole = {
        "iae": control["iae"],
        "travel": control["actuator_travel"],
        "saturated": control["saturated"],
        "lambda": history[-1]["lambda"],
        **excursion(cell, records),
    }
    if not cell.disturbance:
        return {**_held(cell, records), "recovery": None, **whole}
    middle = cell.steps // 2
    before = [record for record in records if record["step"] <= middle]
    after = [record for record in records if record["step"] > middle]
    first, second = _held(cell, before), _held(cell, after)
    worse = {name: min(first[name], second[name]) for name in ("in_band", "in_band_early")}
    back = metrics.held_from(_points(after), BAND)
    recovery = 1.0 if back is None else (back - middle) / cell.steps
    raws = [first["raw"], second["raw"]]
    return {**first, **worse, "raw": None if None in raws else max(raws), "recovery": recovery, **whole}


def smoothed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with S as the product's default filter smooths it, whichever filter the law has; None where held."""
    found = smooth([record["s"] for record in history], PI.ema_alpha)
    return [{**record, "s_ema": s, "held": s is None} for record, s in zip(history, found, strict=True)]


def _points(records: list[dict[str, Any]]) -> list[tuple[int, float | None]]:
    """Each step with the ratio of the smoothed S to the setpoint in force; None where the tick was held."""
    return [(r["step"], None if r["held"] else r["s_ema"] / r["s_target"]) for r in records]


def _held(cell: Cell, records: list[dict[str, Any]]) -> dict[str, float | None]:
    """How an undisturbed stretch of a run was held."""
    points, rise = _points(records), metrics.rise_time(metrics.ratios(records))
    start = metrics.held_from(points, BAND)
    # The ten ticks that qualify are left out of what is counted: they are in band because they were chosen so.
    counted = math.inf if start is None else start + 10 * EVERY
    inside = {step: metrics.in_band(ratio, BAND) for step, ratio in points if step >= counted}
    early = [is_in for step, is_in in inside.items() if step <= EARLY * cell.steps]
    raw = [record["s"] / record["s_target"] for record in records if record["step"] >= counted and not record["held"]]
    return {
        "settling": None if start is None else start / cell.steps,
        "in_band": sum(inside.values()) / len(inside) if inside else 0.0,
        "in_band_early": sum(early) / len(early) if early else 0.0,
        "raw": metrics.worst_mean(raw),
        "overshoot": max([0.0, *(ratio - 1 for _, ratio in points if ratio is not None)]),
        "rise": None if rise is None else rise / cell.steps,
    }


def excursion(cell: Cell, records: list[dict[str, Any]]) -> dict[str, float | None]:
    """How far above and below the setpoint in force the smoothed S comes after the disturbance of a run that has one.

    None for the side of a moved setpoint on which S stands when it is moved.
    """
    if not cell.disturbance:
        return {"peak": None, "dip": None}
    after = [ratio - 1 for step, ratio in metrics.ratios(records) if step > cell.steps // 2]
    return {
        "peak": None if cell.disturbance == "S* /1.5" else max([0.0, *after]),
        "dip": None if cell.disturbance == "S* x1.5" else min([0.0, *after]),
    }


def nothing_held(cell: Cell) -> dict[str, float | None]:
    """The figures of a run that came to nothing."""
    lost = {"in_band": 0.0, "in_band_early": 0.0, "recovery": 1.0 if cell.disturbance else None}
    return {**dict.fromkeys((*WORST, "lambda")), **lost}


def _trajectory(history: list[dict[str, Any]]) -> list[list[float | bool | None]]:
    """Each tick's step and ``COURSE``, in four digits."""

    def short(value: float | bool | None) -> float | bool | None:
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return [[record["step"], *(short(record[name]) for name in COURSE)] for record in history]


def course(cell: Cell, trajectory: list[list[float | bool | None]]) -> list[dict[str, Any]]:
    """The records of a trajectory. In those of older files no tick is marked saturated; it is where lambda is a bound.

    Raises:
        ValueError: a tick is not whole.
    """
    given = dict(setting.partition("=")[::2] for setting in cell.settings)
    given = {name.rpartition(".")[2].strip("-").replace("-", "_"): value for name, value in given.items()}
    low, high = (float(given.get(name, getattr(ControlConfig, name))) for name in ("lambda_min", "lambda_max"))
    with_marks = [point if len(point) > len(COURSE) else [*point, not low < point[3] < high] for point in trajectory]
    return [dict(zip(("step", *COURSE), point, strict=True)) for point in with_marks]


def read_run(path: Path, cell: Cell) -> dict[str, Any]:
    """The finished run of a cell, measured from the trajectory in its file: the file may be older than a figure.

    Raises:
        UserError: the file is not whole, or of something else.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if Cell.of(result) != cell or not {*GOALS, "lambda", "trajectory"} <= result.keys():
            raise ValueError("of another run, or without its figures")
        if not result.setdefault("failed", None):
            result |= measure(cell, course(cell, result["trajectory"]))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        remedy = "move it away, and the run is done again"
        raise UserError(f"--results: {path} is not the record of {cell}, or not all of it; {remedy}") from error
    return result


def summarise(results: list[dict[str, Any]], of: int) -> dict[str, Any]:
    """The worst of each figure, and whether every goal is met: None where none is missed, but not all ``of`` are there.

    ``WORST`` has what a run without a figure counts as.
    """
    worst = {f"worst_{name}": _worst([r[name] for r in results], *how) for name, how in WORST.items()}
    missed = [str(Cell.of(r)) for r in results if not meets_goals(r)]
    failed = [str(Cell.of(r)) for r in results if r["failed"]]
    complete = len(results) == of
    goal_met = False if missed else True if complete else None
    counts = {"cells": len(results), "of": of, "complete": complete}
    return {**counts, **worst, "goals": GOALS, "missed": missed, "failed": failed, "goal_met": goal_met}


def _worst(values: list[float | None], extreme: Callable[..., float | None], missing: float | None) -> float | None:
    there = [missing if value is None else value for value in values]
    return extreme((value for value in there if value is not None), default=None)


def meets_goals(result: dict[str, Any]) -> bool:
    """Whether a run meets every goal that applies to it."""
    if result["settling"] is None or result["in_band"] < GOALS["in_band"]:
        return False
    at_most = ("settling", "overshoot", "raw", *(["recovery"] if result["recovery"] is not None else []))
    return all(result[name] is not None and result[name] <= GOALS[name] for name in at_most)


def run_all(
    cells: list[Cell], jobs: int, results: Path | None, at_most: int | None, console: Console
) -> list[dict[str, Any]]:
    """The finished cells, in order: those read from ``results``, and ``at_most`` so many new ones, written there.

    Raises:
        UserError: a file in ``results`` is not the run's, or a cell's settings or its run are refused.
    """
    found: dict[Cell, dict[str, Any]] = {}
    for cell in cells:
        path = results / f"{cell.key()}.json" if results else None
        if path and path.is_file():
            found[cell] = read_run(path, cell)
    missing = [cell for cell in cells if cell not in found][:at_most]
    for cell in {(cell.controller, cell.settings): cell for cell in missing if cell.settings}.values():
        request_of(cell, "unused")  # here: a wrong setting is refused before any run starts
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers: processes with several threads each wait for one another
    with (
        Progress(*columns, console=console) as progress,
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(
            min(jobs, len(missing) or 1), mp_context=get_context("spawn"), initializer=guard.hush_renamings
        ) as pool,
        _killed_on_error(),
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
                    evidence.write_record(results / f"{cell.key()}.json", result)
                progress.console.print(_line(result), highlight=False)
                progress.advance(task)
    return [found[cell] for cell in cells if cell in found]


@contextmanager
def _killed_on_error() -> Iterator[None]:
    """Kills the workers when the parent is interrupted: a run would take the signal as a wish to end in good order."""
    try:
        yield
    except BaseException:
        for worker in active_children():
            worker.kill()
        raise


def _line(result: dict[str, Any]) -> str:
    if result["failed"]:
        return f"failed {Cell.of(result)}: {result['failed']}"
    mark = "ok    " if meets_goals(result) else "missed"
    return f"{mark} {Cell.of(result)}: " + ", ".join(f"{n} {_percent(result[n])}" for n in (*GOALS, *EXCURSION))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def print_table(results: list[dict[str, Any]], console: Console) -> None:
    """A row for each run, and a line for each that failed."""
    table = Table(title="tracking: the smoothed S against S*, and the raw S in windows of ten ticks", padding=(0, 0))
    shares, numbers = (*GOALS, *EXCURSION, "in_band_early", "rise", "saturated"), ("iae", "travel", "lambda")
    for name in ("S*", "rate", "rank", "corpus", "seed", "disturbance", *shares, *numbers, "goals"):
        table.add_column({"in_band_early": "early", "lambda": "last lambda", "iae": "IAE"}.get(name, name))
    for r in results:
        cell = Cell.of(r)
        what = f"{cell.setpoint:.2%}", f"{cell.learning_rate:g}", str(cell.rank), cell.corpus, str(cell.seed)
        figures = *(_percent(r[name]) for name in shares), *(_number(r[name]) for name in numbers)
        outcome = "failed" if r["failed"] else "met" if meets_goals(r) else "missed"
        table.add_row(*what, cell.disturbance or "", *figures, outcome)
    console.print(table)
    for r in results:
        if r["failed"]:
            console.print(_line(r), highlight=False)


def origins(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many runs are of which machine, versions and revision; None where a file is older than their recording."""
    counted = Counter(json.dumps({name: r.get(name) for name in ORIGIN}, sort_keys=True) for r in results)
    return [{"runs": runs, **json.loads(facts)} for facts, runs in counted.items()]


def _spoken(origin: dict[str, Any]) -> str:
    runs = "1 run" if origin["runs"] == 1 else f"{origin['runs']} runs"
    machine, versions, revision = (origin[name] for name in ORIGIN)
    if machine is None:
        return f"{runs}: machine, versions and revision not recorded"
    where = f"{machine['cpu']}, {machine['cores']} cores, threads of a run: {machine['threads']}"
    return f"{runs}: {where}, torch {versions['torch']}, revision {revision or 'unknown'}"


def build_parser() -> Parser:
    summary = __doc__.partition("\n")[0]
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(description=summary, formatter_class=formatter)
    parser.add_argument("--quick", action="store_true", help="four cells, five to eight minutes on two cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout; progress goes to stderr")
    parser.add_argument("--target-s", type=float, nargs="+", default=list(SETPOINTS), help="setpoints, ratios")
    parser.add_argument("--data-dir", nargs="+", default=list(CORPORA), help="corpora, embedded or your own")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every combination")
    parser.add_argument("--controller", default="pi", choices=TRACKING, help="the law")
    parser.add_argument("--set", nargs="+", default=[], metavar="FLAG[=VALUE]", help="flags of the training script for "
                        f"every run, without their leading hyphens: {EXAMPLE}")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once, one thread each")
    parser.add_argument("--results", type=Path, help="folder of finished runs: read, and added to")
    parser.add_argument("--max-runs", type=int, help="stop after so many runs that were not finished before; 0 only "
                        "reports those in --results")  # fmt: skip
    parser.add_argument("--plot", type=Path, help="write the trajectories as PNG and SVG, at this path without suffix")
    parser.add_debug()
    return parser


def main() -> int:
    options = build_parser().parse_args()
    console = Console(stderr=options.json)
    if not console.is_terminal:
        console.width = 160
    _check(options)
    cells = _cells(options)
    for line in [] if options.quick else left_out(sorted(set(options.target_s))):
        console.print(line, highlight=False)
    results = run_all(cells, options.jobs, options.results, options.max_runs, console)
    if not results:
        raise UserError("--max-runs 0: no run of this grid is finished in --results; leave it out to run them")
    print_table(results, console)
    facts = summarise(results, len(cells))
    worst = {name: value for name, value in facts.items() if name.startswith("worst") and value is not None}
    console.print(", ".join(f"{name} {value:.3g}" for name, value in worst.items()))
    missing = "" if facts["complete"] else f"; {facts['of'] - facts['cells']} missing"
    console.print(f"{facts['cells']} of {facts['of']} runs{missing}", highlight=False)
    where = origins(results)
    for origin in where:
        console.print(_spoken(origin), highlight=False)
    if options.plot:
        from viz.style import save
        from viz.tracking_plot import plot_tracking

        drawn = [(r["cell"], _points(smoothed(course(Cell.of(r), r["trajectory"])))) for r in results]
        save(plot_tracking(drawn, BAND), options.plot)
    if options.json:
        print(json.dumps({**facts, "origins": where, "results": results}))
    return 1 if facts["missed"] else 0


def _check(options: argparse.Namespace) -> None:
    for setpoint in options.target_s:
        if not 0 < setpoint < 1:
            raise UserError(f"--target-s {setpoint}: must lie between 0 and 1, for example 0.02")
    for name, least in (("seeds", 1), ("jobs", 1), ("max_runs", 0)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    if options.results and options.results.exists() and not options.results.is_dir():
        raise UserError(f"--results {options.results}: is a file; name a folder")


def _cells(options: argparse.Namespace) -> list[Cell]:
    """The runs asked for, each once."""
    settings, setpoints = [f"--{setting}" for setting in options.set], sorted(set(options.target_s))
    if options.quick:
        cells = quick(setpoints, options.data_dir, options.controller, settings)
    else:
        cells = grid(setpoints, options.data_dir, options.seeds, options.controller, settings)
    contents = {corpus: digest(corpus) for corpus in options.data_dir}
    return list(dict.fromkeys(replace(cell, content=contents[cell.corpus]) for cell in cells))


if __name__ == "__main__":
    again = "with --results, the runs that are finished are kept and the same command goes on"
    sys.exit(guard.guarded(main, "--debug" in sys.argv, again))
