"""Every way to set lambda on every task at a glance: what it costs over the task's swept best lambda."""

from collections.abc import Iterable
from typing import Any

import numpy as np


def overview(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each arm, at its best setting on each task by validation; below it one for each single setting.

    Arms and settings that were run on one task alone are left out.

    Args:
        tasks: of the report; a task's ``swept_excess`` is of the arms at their best settings, its ``settings`` are all.

    Returns:
        For each line ``name``, ``excess`` by task (of the test bits per token over those of the swept best lambda, on
        the seeds that both have, minus 1), and the ``mean`` and ``worst`` of these.
    """
    lines: list[dict[str, Any]] = []
    for arm in _in_order(row["arm"] for task in tasks for row in task["settings"]):
        lines += _line(arm, {task["name"]: task["swept_excess"].get(arm) for task in tasks})
        settings = _in_order(row["setting"] for task in tasks for row in task["settings"] if row["arm"] == arm)
        if len(settings) > 1:
            for setting in settings:
                lines += _line(
                    f"{arm} {setting}", {task["name"]: _find(task["settings"], arm, setting) for task in tasks}
                )
    return lines


def _in_order(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _find(rows: list[dict[str, Any]], arm: str, setting: str) -> float | None:
    found = (row for row in rows if (row["arm"], row["setting"]) == (arm, setting))
    return next((row["swept_excess"] for row in found), None)


def _line(name: str, by_task: dict[str, float | None]) -> list[dict[str, Any]]:
    excess = {task: value for task, value in by_task.items() if value is not None}
    if len(excess) < 2:
        return []
    values = list(excess.values())
    return [{"name": name, "excess": excess, "mean": float(np.mean(values)), "worst": max(values)}]
