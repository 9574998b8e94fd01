"""Every way to set lambda on every task at a glance: what it costs over the task's swept best lambda."""

from typing import Any

import numpy as np

Excess = dict[str, float | None]
"""By task."""


def overview(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each arm, at its best setting on each task by validation; below it one for each single setting.

    Arms and settings that were run on one task alone are left out.

    Args:
        tasks: of the report; a task's ``swept_excess`` is of the arms at their best settings, its ``settings`` are all.

    Returns:
        For each line ``name``, ``excess`` by task (of the test bits per token over those of the swept best lambda, on
        the seeds that both have, minus 1), and the ``mean`` and ``worst`` of these.
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
        lines += _line(arm, by_task)
        if len(of_settings[arm]) > 1:
            for setting, by_task in of_settings[arm].items():
                lines += _line(f"{arm} {setting}", by_task)
    return lines


def _line(name: str, by_task: Excess) -> list[dict[str, Any]]:
    excess = {task: value for task, value in by_task.items() if value is not None}
    if len(excess) < 2:
        return []
    values = list(excess.values())
    return [{"name": name, "excess": excess, "mean": float(np.mean(values)), "worst": max(values)}]
