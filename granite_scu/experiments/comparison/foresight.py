"""How well a probe foresees S_free: the start of every run without lambda, continued, against its own end."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import logit

from granite_scu.config.settings import OptimizerConfig
from granite_scu.control.diagnostics.setpoint import Point, extrapolate, probe_steps
from granite_scu.experiments.comparison.plan import Plan
from granite_scu.experiments.comparison.transfer import LAST_TICKS
from granite_scu.training.learning_rate import cumulated_rates

UNREGULARISED = ("none", "early-stopping", "none-same-rate")
"""Arms whose runs are without lambda from the first step to the last, at every learning rate they were tried at."""

SHARES = (0.2, 0.3, 0.4, 0.6, 0.8)
"""Lengths of a probe, in shares of the run, that its foresight is tried at."""


def foresight(plan: Plan) -> dict[str, Any]:
    """How many runs ended in the interval that their start gave.

    Runs no longer than a probe have nothing to foresee, and of those with too little to go by nothing is foreseen.

    Returns:
        ``runs``, foreseen by the product's probe; ``shares``: for each ``share`` of the run as the probe, the ``runs``
        foreseen and how many are ``inside``; ``tasks``: at the length of the product's probe, for each ``task`` its
        ``runs``, how many are ``inside``, and of the one that was missed by most, in odds, ``foreseen``, ``low``,
        ``high`` and ``came``, ratios.
    """
    names = [task.name for task in plan.protocol.tasks]  # a shared folder has runs of other protocols
    runs = [r for r in plan.evidence if r["task"] in names and r["arm"] in UNREGULARISED and not r["failed"]]
    runs = [record for record in runs if probe_steps(record["steps"]) < record["steps"]]
    ours = _forecasts(runs, probe_steps)
    of_tasks = {name: [forecast for forecast in ours if forecast["task"] == name] for name in names}
    tried = {share: _forecasts(runs, lambda steps, share=share: round(share * steps)) for share in SHARES}
    return {
        "runs": len(ours),
        "shares": [{"share": share, **_counts(found)} for share, found in tried.items()],
        "tasks": [{"task": n, **_counts(of), **max(of, key=_missed_by)} for n, of in of_tasks.items() if of],
    }


def _counts(forecasts: list[dict[str, Any]]) -> dict[str, int]:
    inside = sum(forecast["low"] <= forecast["came"] <= forecast["high"] for forecast in forecasts)
    return {"runs": len(forecasts), "inside": inside}


def _missed_by(forecast: dict[str, Any]) -> float:
    """In odds."""
    return float(abs(logit(forecast["foreseen"]) - logit(forecast["came"])))


def _forecasts(records: list[dict[str, Any]], probe: Callable[[int], int]) -> list[dict[str, Any]]:
    """Of each run S_free as ``--target-s auto`` would have it after a probe of so many steps, and S as it came.

    A tick here is four steps.
    """
    found = []
    for record in records:
        points, steps = _points(record), record["steps"]
        start = [point for point in points if point.step <= probe(steps)]
        try:
            free = extrapolate(start, _moved(record)[-1])
        except ValueError:  # too few ticks had anything to measure
            continue
        data_bpt = float(np.mean([point.data_bpt for point in points[-LAST_TICKS:]]))
        came = points[-1].param_bpt / (points[-1].param_bpt + data_bpt)
        found.append({"task": record["task"], "foreseen": free.s, "low": free.low, "high": free.high, "came": came})
    return found


def _points(record: dict[str, Any]) -> list[Point]:
    """The ticks that say something of ParamBPT and DataBPT, by S = P / (D + P)."""
    ticks, moved = record["ticks"], _moved(record)
    every = zip(ticks["step"], ticks["s"], ticks["data_bpt"], strict=True)
    known = [(step, s, data) for step, s, data in every if s is not None and data is not None and 0 < s < 1]
    return [Point(step, moved[step], data * s / (1 - s), data) for step, s, data in known]


def _moved(record: dict[str, Any]) -> list[float]:
    names = ("learning_rate", "schedule", "warmup_steps")
    optimizer = OptimizerConfig(**{name: record["settings"][f"optimizer.{name}"] for name in names})
    return cumulated_rates(optimizer, record["steps"])
