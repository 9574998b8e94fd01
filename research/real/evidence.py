"""What the finished runs of a stage say of two adapters: differences in points, paired over seeds and documents."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from granite_scu.evaluation.statistics import DRAWS, LEVEL, Estimate, Floats
from research.comparison.bootstrap import counts
from research.real.grid import (
    FIRST_SEED,
    FREE,
    RUNGS,
    SEEDS,
    Cell,
    Finished,
    Line,
    adapter,
    drifted,
    settled,
    validation,
)

OTHERS = ("general", "chats", "prose", "source")
"""The four texts unlike a task."""


class Judged(NamedTuple):
    """An adapter of an arm on one base and task: the run of the first seed, and the adapter's name."""

    cell: Cell
    point: str


Key = tuple[str, str]
"""A base and a task."""

Of = Mapping[Key, Judged]


@dataclass(frozen=True)
class Difference:
    """Points that an arm's adapters have more than others, averaged over bases and tasks.

    Attributes:
        estimate: with its interval.
        replicates: of the bootstrap, (draws,).
        by_task: of each base and task.
        seeds: the fewest of a base and task.
    """

    estimate: Estimate
    replicates: Floats
    by_task: dict[Key, float]
    seeds: int

    def __str__(self) -> str:
        return f"{self.estimate.mean:+.2f} ({self.estimate.low:+.2f} to {self.estimate.high:+.2f})"

    def p(self, margin: float = 0.0) -> float:
        """How likely it would be, were the arm's really ``margin`` above."""
        return float((1 + (self.replicates >= margin).sum()) / (1 + len(self.replicates)))


def kept(cell: Cell, finished: Finished) -> Judged | None:
    """The adapter that an arm keeps, at its rate; None until that is known."""
    rate = settled(cell, finished)
    return Judged(replace(cell, rate=rate["best"], seed=FIRST_SEED), "best") if rate else None


def so_far(cell: Cell, finished: Finished, drift: float = math.inf) -> Judged | None:
    """The adapter that an arm keeps, at the best of the rates that are finished and at which the first seed has drifted
    by at most so much; None where there is none."""
    tried = [replace(cell, rate=rate) for rate in RUNGS if replace(cell, rate=rate) in finished]
    within = [each for each in tried if drifted(finished[each], "best") <= drift]
    return Judged(min(within, key=lambda each: validation(finished[each], "best")), "best") if within else None


def reference(base: str, task: str, finished: Finished) -> Judged | None:
    """R: of plain's adapters, each at its own rate, that which validates best; None until they are known."""
    cell = Cell(base, task, "plain", 0.0, 0.0)
    rate = settled(cell, finished)
    if rate is None:
        return None
    found = [Judged(replace(cell, rate=rate[point]), point) for point in FREE]
    return min(found, key=lambda each: validation(finished[each.cell], each.point))


def shared(every: Sequence[Of], finished: Finished, seeds: Sequence[int] = SEEDS) -> dict[Key, list[int]]:
    """The bases and tasks on which all of these are run with the same of these seeds, and which they are."""
    found = {key: [seed for seed in seeds if all(replace(of[key].cell, seed=seed) in finished for of in every)]
             for key in sorted(set(every[0]).intersection(*every[1:]))}  # fmt: skip
    return {key: of for key, of in found.items() if of}


def difference(what: str, of: Of, rivals: Of | None, finished: Finished, beside: Of | None = None,
               of_seeds: Sequence[int] = SEEDS) -> Difference | None:  # fmt: skip
    """What an arm's adapters have more than the rivals', or than the base; None where they have no task in common.

    Args:
        what: ``test``, ``others`` (the mean of four texts), in points of the base's bits; ``right``, in per cent of the
            questions, or ``known``, of those that the base has right; of a task without questions there is nothing.
        of, rivals: the adapters.
        finished: the runs.
        beside: adapters whose figure is to stand beside this one: tasks and seeds are those that these have, too.
        of_seeds: the seeds that count.
    """
    replicates, by_task, fewest = [], {}, len(SEEDS)
    every_of = [each for each in (of, rivals, beside) if each is not None]
    for key, seeds in shared(every_of, finished, of_seeds).items():
        pair, at_base = [each[key] for each in (of, rivals) if each is not None], _at_base(key, finished)
        texts = [text for text in (OTHERS if what == "others" else (what,)) if _has(at_base, text)]
        if not texts:
            continue
        fewest, of_texts, means = min(fewest, len(seeds)), [], []
        drawn_seeds = _drawn("-".join(key), len(seeds))
        for text in texts:
            base = _units(at_base, text)
            arm, *rival = (np.array([_scored(finished[replace(each.cell, seed=seed)], each.point, text, base)
                                     for seed in seeds]) for each in pair)  # fmt: skip
            more = arm - (rival[0] if rival else base)
            whole = np.ones(len(base)) if text == "right" else base  # of general questions, those that the base knew
            drawn = _drawn(_name(text, key), len(base))
            with np.errstate(invalid="ignore"):
                of_texts.append(((drawn_seeds @ more) * drawn).sum(1) / (drawn_seeds.sum(1) * (drawn @ whole)))
            means.append(more.mean(0).sum() / whole.sum())
        replicates.append(np.mean(of_texts, axis=0))
        by_task[key] = 100 * float(np.mean(means))
    if not by_task:
        return None
    every = 100 * np.mean(replicates, axis=0)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(every, [tail, 100 - tail])
    return Difference(Estimate(float(np.mean(list(by_task.values()))), float(low), float(high)), every, by_task, fewest)


def count(text: str, key: Key, of: Of, beside: Of, finished: Finished) -> tuple[float, int] | None:
    """Of a task's questions those right (``right``), or of the answers that the base knew those lost (``known``), the
    mean of the seeds that both have; and of how many. None where the adapter was not asked."""
    at_base, (cell, point) = _at_base(key, finished), of[key]
    lines = [finished[replace(cell, seed=seed)] for seed in shared([of, beside], finished)[key]]
    if not _has(at_base, text) or any("points" in line and text not in adapter(line, point) for line in lines):
        return None
    base = _units(at_base, text)
    found = float(np.mean([_scored(line, point, text, base).sum() for line in lines]))
    return (base.sum() - found, int(base.sum())) if text == "known" else (found, len(base))


def _at_base(key: Key, finished: Finished) -> Line:
    """What the base scores, of the one run of a task that has it; nothing where all diverged."""
    return next((line["at_base"] for cell, line in finished.items()
                 if (cell.base, cell.task) == key and "at_base" in line), {"nats": {}, "known": []})  # fmt: skip


def _has(at_base: Line, text: str) -> bool:
    """Of general questions those alone count that the base has right."""
    return any(at_base["known"]) if text == "known" else text in at_base or text in at_base["nats"]


def _units(of: Line, text: str) -> Floats:
    """Nats of each document, or whether each answer is right."""
    return np.array(of[text] if text in ("right", "known") else of["nats"][text], dtype=np.float64)


def _scored(line: Line, point: str, text: str, base: Floats) -> Floats:
    """Of one run; what diverged scores as the base. Of general questions whether one is lost that the base had."""
    if "failed" in line:
        return base
    found = _units(adapter(line, point), text)
    return np.minimum(found, base) if text == "known" else found


def _name(text: str, key: Key) -> str:
    """Documents of one name are drawn together."""
    base, task = key
    return f"{task} {text}" if text in ("test", "right") else f"{base} {text}" if text == "general" else text


@lru_cache(maxsize=32)
def _drawn(name: str, units: int) -> Floats:
    """How often each is drawn; the same for the same name."""
    return counts(np.random.default_rng(zlib.crc32(f"{name} {units}".encode())), units, DRAWS)


def holm(p: Mapping[str, float], of: int, level: float = 1 - LEVEL) -> set[str]:
    """The hypotheses that are shown, all of them together at this level (Holm, Scand. J. Statist. 6, 1979); of so many
    in all, those without runs too."""
    shown: set[str] = set()
    for number, name in enumerate(sorted(p, key=lambda name: p[name])):
        if p[name] > level / (of - number):
            break
        shown.add(name)
    return shown


def processor_seconds(of: Of, rivals: Of, finished: Finished) -> float:
    """Training's, over the rivals', of the seeds that both were trained with on the same processor."""

    def ratio(mine: Line, _: str, theirs: Line) -> float:
        one = mine.get("processor") == theirs.get("processor")
        return mine["train_cpu_s"] / theirs["train_cpu_s"] if one else math.nan

    return mean(ratio, of, rivals, finished)


def mean(figure: Callable[[Line, str, Line], float], of: Of, beside: Of, finished: Finished) -> float:
    """Of bases and tasks, and of the seeds that both have and that did not diverge; a figure that is nan is left out.

    Args:
        figure: of an adapter's run, its name, and the other's run.
        of, beside: the adapters.
        finished: the runs.
    """
    of_tasks = []
    for key, seeds in shared([of, beside], finished).items():
        lines = [[finished[replace(each[key].cell, seed=seed)] for each in (of, beside)] for seed in seeds]
        figures = np.array([figure(mine, of[key].point, theirs) for mine, theirs in lines
                            if "points" in mine and "points" in theirs])  # fmt: skip
        of_tasks.append(figures[~np.isnan(figures)])
    means = [np.mean(figures) for figures in of_tasks if len(figures)]
    return float(np.mean(means)) if means else float("nan")
