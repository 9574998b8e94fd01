"""The runs of an arm on a task, side by side: a row for each of its settings, and the one that validation chooses."""

from dataclasses import dataclass, replace

import numpy as np

from research.comparison.bootstrap import Scores
from research.comparison.plan import Cell, Plan
from research.comparison.protocol import Adapter, Arm, Task

MIN_SEEDS = 3
"""Seeds below which nothing is decided, and two below which arms are not compared: there is no spread to go by."""

SWEEP = ("none", "fixed")
"""Arms that make up the sweep of lambda; 0 is a place in it."""

STOPPED_SWEEP = ("early-stopping", "fixed-stopped")
"""The same sweep with early stopping: validation chooses lambda and the step."""

SWEPT, SWEPT_STOPPED = "swept λ", "swept λ, stopped early"
SWEEPS = {SWEPT: SWEEP, SWEPT_STOPPED: STOPPED_SWEEP}
"""Rivals that are no arm: the best of a sweep on each task, by validation."""


@dataclass(frozen=True, eq=False)
class Row:
    """The runs of one arm at one setting on a task.

    Attributes:
        arm: the setting.
        name: for the table.
        records: finished runs by seed; failed ones are not among them.
        failed: seeds that failed. A setting with any is scored, but is never the best and shows no claim: users who
            took it would have lost those runs.
    """

    arm: Arm
    name: str
    records: dict[int, dict]
    failed: list[int]

    @property
    def begun(self) -> bool:
        """Whether any of its runs is finished, be it as a failed one."""
        return bool(self.records or self.failed)

    def has_finished(self, seed: int) -> bool:
        return seed in self.records or seed in self.failed

    def is_not(self, other: "Row | None") -> bool:
        """Whether these are other results: one of several settings may be the chosen one."""
        if other is None or self.arm.adapter != other.arm.adapter:
            return True
        return {record["key"] for record in self.records.values()} != {r["key"] for r in other.records.values()}

    def validation(self, seeds: list[int]) -> float:
        """Mean validation of the scored adapter, in bits per token."""
        return float(np.mean([self.records[seed]["validation"][self.arm.adapter] for seed in seeds]))

    def scores(self, seeds: list[int], adapter: Adapter | None = None) -> Scores:
        """Test scores of these seeds, of the adapter that counts or another one."""
        return scores_of([self.records[seed] for seed in seeds], adapter or self.arm.adapter)


def scores_of(records: list[dict], adapter: Adapter = "final") -> Scores:
    """Test scores of runs on one task."""
    test = [record["test"] for record in records]
    return Scores(np.array([run[adapter] for run in test]), np.array(test[0]["tokens"]))


def row_of(plan: Plan, task: Task, arm: Arm, name: str | None = None) -> Row:
    """What is finished of an arm on a task, on the seeds asked for."""
    found = {seed: plan.record(Cell(task, arm, seed)) for seed in plan.seeds}
    finished = {seed: record for seed, record in found.items() if record}
    good = {seed: record for seed, record in finished.items() if not record["failed"]}
    return Row(arm, name or arm.label, good, [seed for seed in finished if seed not in good])


def rows_of(plan: Plan, task: Task, names: tuple[str, ...]) -> list[Row]:
    """A row for every setting that the protocol has of these arms."""
    return [row_of(plan, task, arm) for arm in plan.protocol.arms if arm.name in names]


def best_of(rows: list[Row], seeds: list[int] | None = None) -> Row | None:
    """The row with the best validation over these seeds; rows with a failed seed are none.

    Without ``seeds``, of the rows that have any those that all have. With them, None where a row lacks one: it might be
    the best.
    """
    rows = [row for row in rows if not row.failed]
    if seeds is None:
        rows = [row for row in rows if row.records]
        seeds = common_seeds(rows)
    whole = all(seed in row.records for row in rows for seed in seeds)
    return min(rows, key=lambda row: row.validation(seeds)) if rows and seeds and whole else None


def best_of_sweep(plan: Plan, task: Task, names: tuple[str, ...]) -> Row | None:
    """Of all settings of these arms the one that validation prefers; None until each is begun: any may be the best."""
    rows = rows_of(plan, task, names)
    return best_of(rows) if all(row.begun for row in rows) else None


def mean_of_known(values: list[float | None]) -> float | None:
    """The mean of what ticks hold; a tick without a measurement holds None. None where all do."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def decides(seeds: int) -> bool:
    """Whether a comparison on so many seeds may be called shown."""
    return seeds >= MIN_SEEDS


def common_seeds(rows: list[Row]) -> list[int]:
    """The seeds that all have."""
    return sorted(set.intersection(*(set(row.records) for row in rows))) if rows else []


def best_of_each_arm(every: list[Row]) -> list[Row]:
    """One row an arm: of several settings the one with the best validation on this very task."""
    rows: list[Row] = []
    for name in dict.fromkeys(row.arm.name for row in every):
        settings = [row for row in every if row.arm.name == name]
        chosen = best_of(settings)
        if chosen is None:
            rows += settings[:1]
        elif len(settings) > 1:
            rows.append(replace(chosen, name=f"{name}, swept ({chosen.arm.setting})"))
        else:
            rows.append(chosen)
    return rows
