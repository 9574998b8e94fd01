"""What a way to set lambda costs: the training that it takes, over that of one run without regularisation."""

from dataclasses import dataclass

import numpy as np

from research.comparison.plan import Plan
from research.comparison.protocol import NONE
from research.comparison.rows import Row, common_seeds, row_of


@dataclass(frozen=True)
class Cost:
    """A mean over tasks, in runs without regularisation of the same task and seeds.

    The search for the learning rate is not counted: every arm needs it.

    Attributes:
        runs: how many runs.
        tokens: their training tokens.
        seconds: their processor time, loading and scoring included; each is done by one thread. Time on the clock
            would say more about what else the machine did.
    """

    runs: int
    tokens: float
    seconds: float


def cost(plan: Plan, names: tuple[str, ...], setting: str | None = None) -> Cost | None:
    """Of doing all settings of these arms, or one setting; None where no task has the runs that tell.

    An arm that takes its lambda from another run needs that run too.
    """
    arms = [arm for arm in plan.protocol.arms if arm.name in names and setting in (None, arm.setting)]
    needed = [*arms, *(source for arm in arms if (source := plan.source_of(arm)))]
    rows = [(row_of(plan, task, NONE), [row_of(plan, task, arm) for arm in needed]) for task in plan.tasks]
    if not (found := [_ratios(*each) for each in rows if arms and common_seeds([each[0], *each[1]])]):
        return None
    tokens, seconds = np.mean(found, axis=0)
    return Cost(len(needed), float(tokens), float(seconds))


def _ratios(plain: Row, rows: list[Row]) -> np.ndarray:
    """Tokens and seconds of these rows together, over those of the task's runs without regularisation."""
    seeds = common_seeds([plain, *rows])
    of_rows: np.ndarray = np.sum([_spent(row, seeds) for row in rows], axis=0)
    return of_rows / _spent(plain, seeds)


def _spent(row: Row, seeds: list[int]) -> np.ndarray:
    """Training tokens and processor seconds of a run, the mean over seeds."""
    records = [row.records[seed] for seed in seeds]
    spent: np.ndarray = np.mean([[record["tokens"], record["cpu_time_s"]] for record in records], axis=0)
    return spent
