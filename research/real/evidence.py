"""What the finished runs of a stage say of two adapters: differences in points, paired over seeds and documents."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from granite_scu.evaluation.statistics import DRAWS, LEVEL, Estimate, Floats
from research.comparison.bootstrap import counts
from research.real.grid import FIRST_SEED, FREE, SEEDS, Cell, Finished, Line, adapter, settled, validation

OTHERS = ("general", "chats", "prose", "source")
"""The four texts unlike a task."""


class Judged(NamedTuple):
    """An adapter of an arm on one base and task: the run of the first seed, and the adapter's name."""

    cell: Cell
    point: str


Of = Mapping[tuple[str, str], Judged]
"""By base and task."""


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
    by_task: dict[tuple[str, str], float]
    seeds: int

    def p(self, margin: float = 0.0) -> float:
        """How likely it would be, were the arm's really ``margin`` above."""
        return float((1 + (self.replicates >= margin).sum()) / (1 + len(self.replicates)))


def kept(cell: Cell, finished: Finished) -> Judged | None:
    """The adapter that an arm keeps, at its rate; None until that is known."""
    rate = settled(cell, finished)
    return Judged(replace(cell, rate=rate["best"], seed=FIRST_SEED), "best") if rate else None


def reference(base: str, task: str, finished: Finished) -> Judged | None:
    """R: of plain's adapters, each at its own rate, that which validates best; None until they are known."""
    cell = Cell(base, task, "plain", 0.0, 0.0)
    rate = settled(cell, finished)
    if rate is None:
        return None
    found = [Judged(replace(cell, rate=rate[point]), point) for point in FREE]
    return min(found, key=lambda each: validation(finished[each.cell], each.point))


def difference(what: str, of: Of, rivals: Of | None, finished: Finished) -> Difference | None:
    """What an arm's adapters have more than the rivals', or than the base; None where they have no task in common.

    Args:
        what: ``test``, ``others`` (the mean of four texts), in points of the base's bits; ``right`` or ``known``, in
            per cent of the questions; of a task without questions there is nothing.
        of, rivals: the adapters.
        finished: the runs.
    """
    replicates, by_task, fewest = [], {}, len(SEEDS)
    for key in sorted(of.keys() & (of if rivals is None else rivals).keys()):
        pair = [each[key] for each in (of, rivals) if each is not None]
        seeds = [seed for seed in SEEDS if all(replace(each.cell, seed=seed) in finished for each in pair)]
        at_base = next((line["at_base"] for cell, line in finished.items()
                        if (cell.base, cell.task) == key and "at_base" in line), None)  # fmt: skip
        texts = [text for text in (OTHERS if what == "others" else (what,)) if at_base and _has(at_base, text)]
        if not seeds or not texts or at_base is None:
            continue
        fewest, of_texts, means = min(fewest, len(seeds)), [], []
        of_seeds = _drawn("-".join(key), len(seeds))
        for text in texts:
            base = _units(at_base, text)
            arm, *rival = (np.array([_scored(finished[replace(each.cell, seed=seed)], each.point, text, base)
                                     for seed in seeds]) for each in pair)  # fmt: skip
            more = arm - (rival[0] if rival else base)
            whole = np.ones(len(base)) if text in ("right", "known") else base
            drawn = _drawn(_name(text, key), len(base))
            with np.errstate(invalid="ignore"):
                of_texts.append(((of_seeds @ more) * drawn).sum(1) / (of_seeds.sum(1) * (drawn @ whole)))
            means.append(more.mean(0).sum() / whole.sum())
        replicates.append(np.mean(of_texts, axis=0))
        by_task[key] = 100 * float(np.mean(means))
    if not by_task:
        return None
    every = 100 * np.mean(replicates, axis=0)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(every, [tail, 100 - tail])
    return Difference(Estimate(float(np.mean(list(by_task.values()))), float(low), float(high)), every, by_task, fewest)


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


def _name(text: str, key: tuple[str, str]) -> str:
    """Documents of one name are drawn together."""
    base, task = key
    return f"{task} {text}" if text in ("test", "right") else f"{base} {text}" if text == "general" else text


@lru_cache(maxsize=32)
def _drawn(name: str, units: int) -> Floats:
    """How often each is drawn; the same for the same name."""
    return counts(np.random.default_rng(zlib.crc32(f"{name} {units}".encode())), units, DRAWS)


def holm(p: Mapping[str, float], level: float = 1 - LEVEL) -> set[str]:
    """The hypotheses that are shown, all of them together at this level (Holm, Scand. J. Statist. 6, 1979)."""
    shown: set[str] = set()
    for number, name in enumerate(sorted(p, key=lambda name: p[name])):
        if p[name] > level / (len(p) - number):
            break
        shown.add(name)
    return shown


def processor_seconds(of: Of, rivals: Of, finished: Finished) -> float:
    """Training's, over the rivals', the mean of bases and tasks."""
    pairs: Iterable = ((finished[of[key].cell], finished[rivals[key].cell]) for key in of.keys() & rivals.keys())
    shares = [mine["train_cpu_s"] / theirs["train_cpu_s"] for mine, theirs in pairs
              if "train_cpu_s" in mine and "train_cpu_s" in theirs]  # fmt: skip
    return float(np.mean(shares)) if shares else float("nan")
