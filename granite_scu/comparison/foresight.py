"""How well a probe foresees S_free: the start of every run without lambda, continued, against its own end."""

from typing import Any

import numpy as np

from granite_scu.comparison.plan import Plan
from granite_scu.config import OptimizerConfig
from granite_scu.control.setpoint import Free, Point, extrapolate, probe_steps
from granite_scu.planning import cumulated_rates

UNREGULARISED = ("none", "early-stopping")
"""Arms whose runs are without lambda from the first step to the last, at every learning rate they were tried at."""

LAST_TICKS = 8
"""Ticks at the end over which the data's bits are averaged."""


def foresight(plan: Plan) -> list[dict[str, Any]]:
    """A row for each task: its runs, how many ended in the interval, and S_free as foreseen and as it came.

    Returns:
        ``task``, ``runs``, ``inside``, and of the run whose S_free was missed by most ``foreseen``, ``low``, ``high``
        and ``came``, ratios. Runs no longer than a probe have nothing to foresee; tasks without others are left out.
    """
    rows = []
    runs = [r for r in plan.evidence if r["arm"] in UNREGULARISED and not r["failed"]]
    for task in plan.protocol.tasks:
        records = [r for r in runs if r["task"] == task.name and probe_steps(r["steps"]) < r["steps"]]
        pairs = [(_foreseen(record), _came(record)) for record in records]
        if pairs:
            free, came = max(pairs, key=lambda pair: abs(pair[0].s - pair[1]))
            inside = sum(free.low <= s <= free.high for free, s in pairs)
            missed = {"foreseen": free.s, "low": free.low, "high": free.high, "came": came}
            rows.append({"task": task.name, "runs": len(pairs), "inside": inside, **missed})
    return rows


def _foreseen(record: dict[str, Any]) -> Free:
    """What ``--target-s auto`` would have said after the first steps; a tick here is four steps, there three."""
    ticks, settings, steps = record["ticks"], record["settings"], record["steps"]
    fields = ("learning_rate", "schedule", "warmup_steps")
    moved = cumulated_rates(OptimizerConfig(**{name: settings[f"optimizer.{name}"] for name in fields}), steps)
    measured = zip(ticks["step"], ticks["s"], ticks["data_bpt"], strict=True)
    points = [Point(step, moved[step], _param_bpt(s, data), data) for step, s, data in measured]
    return extrapolate([point for point in points if point.step <= probe_steps(steps)], moved[-1])


def _came(record: dict[str, Any]) -> float:
    """S at the end: of the last ParamBPT, and the data's bits averaged over the last ticks."""
    ticks = record["ticks"]
    param_bpt = _param_bpt(ticks["s"][-1], ticks["data_bpt"][-1])
    return param_bpt / (param_bpt + float(np.mean(ticks["data_bpt"][-LAST_TICKS:])))


def _param_bpt(s: float, data_bpt: float) -> float:
    """From S = P / (D + P)."""
    return data_bpt * s / (1 - s)
