"""The cells of the protocol in its order; which come next follows from what is finished."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

from benchmarks.cells import REAL
from research.real.tasks import TASKS

Line = dict[str, Any]

RUNGS = tuple(float(f"{mantissa}e{power}") for power in range(-6, 1) for mantissa in (1, 3))
"""Learning rates."""
START, MOST_RATES = 3, 9
FIRST_SEED, SEEDS = 0, (0, 1, 2, 3, 4)

SMALL = ("tiny-granite-h", "tiny-prose-dense", "tiny-prose-hybrid")
MIDDLE_RATE = {REAL: 1e-3}
USUAL_MIDDLE_RATE = 3e-3

ARMS: dict[str, tuple[float, ...]] = {
    "plain": (0.0,), "auto": (0.0,), "drift": (0.02, 0.01, 0.05), "kl": (1.0, 10.0), "replay": (0.05, 0.5),
    "lambda": (0.01, 0.001, 0.1), "decay": (0.1, 0.01, 1.0), "dropout": (0.1,), "rank": (4.0, 64.0), "both": (0.02,),
    "held": (0.05,), "wide": (0.02,), "first-replay": (0.05,), "cut-replay": (0.05,), "unscaled-replay": (0.05,),
}  # fmt: skip
"""Each with its values. ``held`` has the limit of a budget, and a weight that is fixed at what the loop begins with.
Some are not run any more: ``wide`` is what drift was until 29 November, with a lambda of up to
1000. The others are what replay was until 30 November. In ``first-replay`` each epoch had the same few texts, and
questions lacked their first words; in ``cut-replay`` two of three texts ended in the middle of a sentence;
``unscaled-replay`` is today's, without its scaled adapters."""

FORMER = ("wide", "first-replay", "cut-replay", "unscaled-replay")

HEADLINES = (("plain", 0.0), ("auto", 0.0), ("drift", 0.02))
"""Arms and values of five seeds. So has the value of kl that validates best."""

GROUPS: tuple[tuple[tuple[str, float], ...], ...] = (
    HEADLINES,
    (("kl", 1.0), ("kl", 10.0), ("replay", 0.05), ("replay", 0.5), ("drift", 0.01), ("drift", 0.05)),
    tuple((arm, value) for arm in ("lambda", "decay", "dropout", "rank", "both") for value in ARMS[arm]),
)
"""What is run after what, on one base."""

FREE = ("end", "best", "mean", "ema", "scaled")
"""What plain gives for nothing. Other arms are judged by the adapter that they keep, ``best``."""

SCALED = {0.25: "x 0.25", 0.5: "x 0.5", 0.75: "x 0.75", 1.0: "end"}
"""The last adapter of a plain run, by its scale."""

RIVALS = ("plain", "decay", "dropout", "rank", "replay")
"""Of whose adapters the strongest free rival of a loop is one."""

LOOPS = HEADLINES[1:]
"""Of which F has five seeds."""


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        base: ``smollm2`` or one of ``SMALL``.
        task: one of ``TASKS``.
        arm, value: one of ``ARMS``.
        rate: peak learning rate.
        seed: of the run.
    """

    base: str
    task: str
    arm: str
    value: float
    rate: float
    seed: int = 0

    @classmethod
    def of(cls, line: Line) -> "Cell":
        """The cell that a line of the results is about."""
        return cls(**{field.name: line[field.name] for field in fields(cls)})

    @property
    def judged(self) -> tuple[str, ...]:
        """The adapters by which its rate is chosen."""
        return FREE if self.arm == "plain" else ("best",)

    def __str__(self) -> str:
        value = f" {self.value:g}" if self.value else ""
        return f"{self.base} {self.task} {self.arm}{value} rate {self.rate:g} seed {self.seed}"


Finished = dict[Cell, Line]


class Stage(NamedTuple):
    """Bases, tasks and groups of arms that are run together."""

    bases: Sequence[str]
    tasks: Sequence[str]
    groups: Sequence[Sequence[tuple[str, float]]]


STAGES = {
    "A": Stage(SMALL, tuple(TASKS), (HEADLINES[:2],)),
    "B": Stage((REAL,), tuple(TASKS)[:5], GROUPS[:2]),
    "C": Stage((REAL,), tuple(TASKS), GROUPS),
    "D": Stage(SMALL[:1], tuple(TASKS), GROUPS),
    "E": Stage(SMALL, tuple(TASKS)[:5], ((HEADLINES[0], HEADLINES[2]),)),
}


def adapter(line: Line, point: str) -> Line:
    """What one adapter of a run scored; of the scaled ones that which validates best; at a scale that was not measured
    ("x 0.3") what lies between its neighbours."""
    points = line["points"]
    if point.startswith("x ") and point not in points:
        return between(points, float(point.removeprefix("x ")))
    scaled = [of for name, of in points.items() if name.startswith("x ")] if point == "scaled" else [points[point]]
    return min(scaled, key=lambda of: of["validation"])


def between(points: dict[str, Line], scale: float) -> Line:
    """Bits, drift and nats at a scale of a plain run's last adapter, each a straight line from scale to scale."""
    low, high = next(pair for pair in pairwise(SCALED) if pair[0] <= scale <= pair[1])
    lower, higher, share = points[SCALED[low]], points[SCALED[high]], (scale - low) / (high - low)

    def mixed(of: float, to: float) -> float:
        return of + share * (to - of)

    nats = {text: list(map(mixed, of, higher["nats"][text])) for text, of in lower["nats"].items()}
    return {"nats": nats} | {what: mixed(lower[what], higher[what]) for what in ("validation", "drift")}


def validation(line: Line | None, point: str) -> float:
    """Bits a token on the validation records of one adapter of a run; infinite where it diverged."""
    return float(adapter(line, point)["validation"]) if line and "points" in line else math.inf


def drifted(line: Line, point: str) -> float:
    """The share of drift of one adapter of a run; none where it diverged, for it scores as the base."""
    return float(adapter(line, point)["drift"]) if "points" in line else 0.0


def rates(cell: Cell, finished: Finished) -> list[float]:
    """The rates of an arm, value, task and base that are to be run, those that follow from finished ones among them."""
    middle = RUNGS.index(MIDDLE_RATE.get(cell.base, USUAL_MIDDLE_RATE))
    low, high = middle - START // 2, middle + START // 2
    while high - low + 1 < MOST_RATES and all(replace(cell, rate=rate) in finished for rate in RUNGS[low : high + 1]):
        best = {RUNGS.index(rate) for rate in chosen(cell, RUNGS[low : high + 1], finished).values()}
        lower, higher = low in best and low > 0, high in best and high < len(RUNGS) - 1
        if not (lower or higher):
            break
        low -= lower
        high += higher and high - low + 1 < MOST_RATES
    return [*RUNGS[middle : high + 1], *RUNGS[low:middle][::-1]]


def chosen(cell: Cell, tried: Iterable[float], finished: Finished) -> dict[str, float]:
    """By adapter of an arm, the rate that validates best on the first seed."""
    lines = {rate: finished.get(replace(cell, rate=rate, seed=FIRST_SEED)) for rate in tried}
    return {point: min(lines, key=lambda rate: validation(lines[rate], point)) for point in cell.judged}


def settled(cell: Cell, finished: Finished) -> dict[str, float] | None:
    """By adapter, the rate of an arm, value, task and base; None until it is known."""
    cell = replace(cell, seed=FIRST_SEED)
    tried = rates(cell, finished)
    return chosen(cell, tried, finished) if all(replace(cell, rate=rate) in finished for rate in tried) else None


def interior(cell: Cell, finished: Finished, point: str) -> bool:
    """Whether the rate of an adapter lies inside those that were tried."""
    tried, found = sorted(rates(replace(cell, seed=FIRST_SEED), finished)), settled(cell, finished)
    return found is not None and tried[0] < found[point] < tried[-1]


def has_seeds(cell: Cell, stage: Stage, finished: Finished) -> bool:
    """Whether an arm and value have five seeds, on a task and base where their rates are known."""
    return (cell.arm, cell.value) in HEADLINES or (cell.arm == "kl" and cell.value == best_kl(stage, finished))


def best_kl(stage: Stage, finished: Finished) -> float | None:
    """The value of kl that validates best on all bases and tasks of a stage; None until all are known."""
    found = dict.fromkeys(ARMS["kl"], 0.0)
    for base, task, value in product(stage.bases, stage.tasks, found):
        own = Cell(base, task, "kl", value, 0.0)
        if (rate := settled(own, finished)) is None:
            return None
        found[value] += math.log(validation(finished[replace(own, rate=rate["best"])], "best"))
    return min(found, key=lambda value: found[value])


def free_rival(loop: Cell, finished: Finished) -> tuple[Cell, str] | None:
    """The strongest free rival of a loop on one task and base, by the first seed: a run and the adapter of it. None
    until rates are known.

    Of all adapters of ``RIVALS`` that validate no worse, that with least drift; if there is none, the best validated.
    """
    worst = to_match(loop, finished)
    if worst is None:
        return None
    every = [(cell, name, of) for cell, points in _rivals_of(loop, finished) for name, of in points.items()]
    as_good = [each for each in every if each[2]["validation"] <= worst]
    cell, name, _ = (min(as_good, key=lambda each: each[2]["drift"]) if as_good
                     else min(every, key=lambda each: each[2]["validation"]))  # fmt: skip
    return cell, name


def scaled_rival(loop: Cell, finished: Finished) -> tuple[Cell, str] | None:
    """The free rival that validates just as the loop does, by the first seed: a plain run, and its last adapter at the
    scale at which the straight line between two that were measured does so. Of all rates that with least drift; None
    until rates are known, and where no run's scales have the loop's validation between them."""
    wanted, found = to_match(loop, finished), []
    if wanted is None:
        return None
    for cell, points in _rivals_of(loop, finished):
        for low, high in pairwise(SCALED) if cell.arm == "plain" else ():
            of, to = (points[SCALED[scale]]["validation"] for scale in (low, high))
            if min(of, to) <= wanted <= max(of, to):
                scale = low + (high - low) * ((wanted - of) / (to - of) if to != of else 0.0)
                found.append((cell, f"x {scale}"))
    return min(found, key=lambda each: adapter(finished[each[0]], each[1])["drift"], default=None)


def to_match(loop: Cell, finished: Finished) -> float | None:
    """Validation bits of the adapter that a loop keeps, of the first seed; None until rates are known."""
    own = settled(loop, finished)
    if own is None or settled(replace(loop, arm="plain", value=0.0), finished) is None:
        return None
    return validation(finished[replace(loop, rate=own["best"], seed=FIRST_SEED)], "best")


def _rivals_of(loop: Cell, finished: Finished) -> Iterator[tuple[Cell, dict[str, Line]]]:
    """First seeds of ``RIVALS`` on the loop's base and task, with their adapters."""
    here = loop.base, loop.task, FIRST_SEED
    return ((cell, line["points"]) for cell, line in finished.items() if "points" in line
            if (cell.base, cell.task, cell.seed) == here and cell.arm in RIVALS)  # fmt: skip


def plan(stage: Stage, finished: Finished) -> Iterator[Cell]:
    """The cells of a stage in the order of the protocol, as far as what is finished tells them."""
    for base in stage.bases:
        for group in stage.groups:
            firsts = [Cell(base, task, arm, value, 0.0) for arm, value in group for task in stage.tasks]
            for first in firsts:
                yield from (replace(first, rate=rate) for rate in rates(first, finished))
            for seed in SEEDS[1:]:
                for first in firsts:
                    found = settled(first, finished)
                    if found and has_seeds(first, stage, finished):
                        yield from (replace(first, rate=rate, seed=seed) for rate in sorted(set(found.values())))
        arms = [arm for group in stage.groups for arm in group if arm in LOOPS]
        loops = [Cell(base, task, *arm, 0.0) for task in stage.tasks for arm in arms]
        every = (find(loop, finished) for loop in loops for find in (free_rival, scaled_rival))
        rivals = [rival for rival in every if rival]
        yield from (replace(rival, seed=seed) for seed in SEEDS[1:] for rival, _ in rivals)
    yield from amended(stage, finished)


LARGE = ("drift", 0.05)
HELD = ("held", 0.05)
HELD_RATES = (1e-3, 3e-3)
DEFAULT_RATES = (1.3e-3, 2.6e-3)
"""The package's for SmolLM2, and twice that."""


def large(base: str, task: str) -> Cell:
    """A budget of 5 % at the rate of which the sixth amendment has five seeds."""
    return Cell(base, task, *LARGE, 1e-3 if task == "brook" else 3e-3)


def amended(stage: Stage, finished: Finished) -> Iterator[Cell]:
    """On SmolLM2, in their order, what the sixth, ninth and eighth amendments ask, as far as is known."""
    if REAL not in stage.bases:
        return
    tasks, own = ([task for task in stage.tasks if (task in STAGES["B"].tasks) == is_of_b] for is_of_b in (True, False))
    yield from (replace(large(REAL, task), seed=seed) for task in tasks for seed in SEEDS[1:])
    held = {task: [Cell(REAL, task, *HELD, rate) for rate in HELD_RATES] for task in tasks}
    yield from (cell for cells in held.values() for cell in cells)
    for seed in SEEDS[1:]:
        for cells in held.values():
            if all(cell in finished for cell in cells):
                yield replace(min(cells, key=lambda cell: validation(finished[cell], "best")), seed=seed)
    for seed in SEEDS[:2]:
        yield from (Cell(REAL, task, *LARGE, rate, seed) for task in own for rate in DEFAULT_RATES)


def to_do(stage: Stage, finished: Finished) -> Iterator[Cell]:
    """The cells that can be run now, each once."""
    return (cell for cell in dict.fromkeys(plan(stage, finished)) if cell not in finished)
