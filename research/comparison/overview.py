"""Every way to set lambda on every task at a glance: what it ends above the task's swept best lambda, and its cost."""

from dataclasses import asdict
from typing import Any

import numpy as np

from research.comparison.cost import Cost, cost
from research.comparison.plan import Plan
from research.comparison.rows import SWEEPS

Excess = dict[str, float | None]
"""By task."""


def overview(plan: Plan, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each arm, at its best setting on each task by validation; below it one for each single setting.

    Arms and settings that were run on one task alone are left out. The sweeps come last.

    Args:
        plan: of the comparison.
        tasks: of the report; a task's ``swept_excess`` is of the arms at their best settings, its ``settings`` are all.

    Returns:
        For each line ``name``, ``excess`` by task (of the test bits per token over those of the swept best lambda, on
        the seeds that both have, minus 1), the ``mean`` and ``worst`` of these, and ``cost`` (see ``Cost``; None where
        it is not known).
    """
    of_arms: dict[str, Excess] = {}
    of_settings: dict[str, dict[str, Excess]] = {}
    for task in tasks:
        for row in task["settings"]:
            arm, setting = row["arm"], row["setting"]
            of_arms.setdefault(arm, {})[task["name"]] = task["swept_excess"].get(arm)
            of_settings.setdefault(arm, {}).setdefault(setting, {})[task["name"]] = row["swept_excess"]
    lines: list[dict[str, Any]] = []
    for arm, by_task in of_arms.items():
        lines += _line(arm, by_task, cost(plan, (arm,)))
        if len(of_settings[arm]) > 1:
            for setting, by_task in of_settings[arm].items():
                lines += _line(f"{arm} {setting}", by_task, cost(plan, (arm,), setting))
    for name, arms in SWEEPS.items():
        lines += _line(name, {task["name"]: task["swept_excess"].get(name) for task in tasks}, cost(plan, arms))
    return lines


def _line(name: str, by_task: Excess, spent: Cost | None) -> list[dict[str, Any]]:
    excess = {task: value for task, value in by_task.items() if value is not None}
    if len(excess) < 2:
        return []
    values, found = list(excess.values()), {"excess": excess, "cost": spent and asdict(spent)}
    return [{"name": name, **found, "mean": float(np.mean(values)), "worst": max(values)}]
