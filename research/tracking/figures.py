"""The figures of a run and of the grid, as the head of ``research.tracking`` defines them, and their goals."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from granite_scu.control import PI
from granite_scu.control.diagnostics import metrics
from granite_scu.control.laws.filter import Ema
from research.tracking.grid import EVERY, TrackingCell

BAND = 0.1
"""How far S may be from S*, as a share of S*."""
GOALS = {"in_band": 0.9, "settling": 0.15, "overshoot": 0.25, "raw": 0.15, "recovery": 0.15}
EXCURSION = ("peak", "dip")
EARLY = 0.8
"""The share of a run's steps over which it counts as early."""
WORST = {
    "in_band": (min, 0.0),
    "settling": (max, 1.0),
    "overshoot": (max, None),
    "raw": (max, 1.0),
    "recovery": (max, None),
    "peak": (max, None),
    "dip": (min, None),
    "in_band_early": (min, 0.0),
    "rise": (max, 1.0),
    "iae": (max, None),
    "travel": (max, None),
    "saturated": (max, None),
}
"""Of each figure which is the worst, and what a run without it counts as; None: it does not count."""


def measure(cell: TrackingCell, history: list[dict[str, Any]]) -> dict[str, float | None]:
    """The figures of a run; None where S never settled, and where the question does not arise."""
    records = smoothed(history)
    control = metrics.summarise(records, BAND)
    whole = {
        "iae": control["iae"],
        "travel": control["actuator_travel"],
        "saturated": control["saturated"],
        "lambda": history[-1]["lambda"],
        **excursion(cell, records),
    }
    if not cell.disturbance:
        return {**_held(cell, records), "recovery": None, **whole}
    middle = cell.steps // 2
    before = [record for record in records if record["step"] <= middle]
    after = [record for record in records if record["step"] > middle]
    first, second = _held(cell, before), _held(cell, after)
    worse = {name: min(first[name], second[name]) for name in ("in_band", "in_band_early")}
    back = held_from(points_of(after), BAND)
    recovery = 1.0 if back is None else (back - middle) / cell.steps
    raws = [first["raw"], second["raw"]]
    return {**first, **worse, "raw": None if None in raws else max(raws), "recovery": recovery, **whole}


def smoothed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with S as the product's default filter smooths it, whichever filter the law has; None where held."""
    found = smooth([record["s"] for record in history], PI.ema_alpha)
    return [{**record, "s_ema": s, "held": s is None} for record, s in zip(history, found, strict=True)]


def smooth(values: Iterable[float | None], alpha: float) -> list[float | None]:
    """What the filter makes of one raw S after another; None where one has no logarithm, which leaves it alone."""
    ema, found = Ema(), list[float | None]()
    for s in values:
        if s is None or not 0 < s < math.inf:
            found.append(None)
        else:
            ema = ema.update(math.log(s), alpha)
            found.append(math.exp(ema.mean))
    return found


def points_of(records: list[dict[str, Any]]) -> list[tuple[int, float | None]]:
    """Each step with the ratio of the smoothed S to the setpoint in force; None where the tick was held."""
    return [(r["step"], None if r["held"] else r["s_ema"] / r["s_target"]) for r in records]


def _held(cell: TrackingCell, records: list[dict[str, Any]]) -> dict[str, float | None]:
    """How an undisturbed stretch of a run was held."""
    points, rise = points_of(records), metrics.rise_time(metrics.ratios(records))
    start = held_from(points, BAND)
    # The ten ticks that qualify are left out of what is counted: they are in band because they were chosen so.
    counted = math.inf if start is None else start + 10 * EVERY
    inside = {step: metrics.in_band(ratio, BAND) for step, ratio in points if step >= counted}
    early = [is_in for step, is_in in inside.items() if step <= EARLY * cell.steps]
    raw = [record["s"] / record["s_target"] for record in records if record["step"] >= counted and not record["held"]]
    return {
        "settling": None if start is None else start / cell.steps,
        "in_band": sum(inside.values()) / len(inside) if inside else 0.0,
        "in_band_early": sum(early) / len(early) if early else 0.0,
        "raw": worst_mean(raw),
        "overshoot": max([0.0, *(ratio - 1 for _, ratio in points if ratio is not None)]),
        "rise": None if rise is None else rise / cell.steps,
    }


def held_from(
    points: Sequence[tuple[int, float | None]], band: float, ticks: int = 10, share: float = 0.9
) -> int | None:
    """The first step at which S is in band and from which it stays there for ``share`` of so many ticks.

    A tick without a ratio, which had no usable measurement, is out of band.
    Unlike ``metrics.settling_time`` it does not look at the rest of the run, so the fraction in band after it says
    something.
    """
    inside = [metrics.in_band(ratio, band) for _, ratio in points]
    starts = (i for i in range(len(inside) - ticks + 1) if inside[i] and sum(inside[i : i + ticks]) >= share * ticks)
    return next((points[i][0] for i in starts), None)


def worst_mean(values: Sequence[float], window: int = 10) -> float | None:
    """The largest |mean - 1| over every run of so many values; None where there are fewer."""
    means = (sum(values[i : i + window]) / window for i in range(len(values) - window + 1))
    return max((abs(mean - 1) for mean in means), default=None)


def excursion(cell: TrackingCell, records: list[dict[str, Any]]) -> dict[str, float | None]:
    """How far above and below the setpoint in force the smoothed S comes after the disturbance of a run that has one.

    None for the side of a moved setpoint on which S stands when it is moved.
    """
    if not cell.disturbance:
        return {"peak": None, "dip": None}
    after = [ratio - 1 for step, ratio in metrics.ratios(records) if step > cell.steps // 2]
    return {
        "peak": None if cell.disturbance == "S* /1.5" else max([0.0, *after]),
        "dip": None if cell.disturbance == "S* x1.5" else min([0.0, *after]),
    }


def nothing_held(cell: TrackingCell) -> dict[str, float | None]:
    """The figures of a run that came to nothing."""
    lost = {"in_band": 0.0, "in_band_early": 0.0, "recovery": 1.0 if cell.disturbance else None}
    return {**dict.fromkeys((*WORST, "lambda")), **lost}


def summarise(results: list[dict[str, Any]], of: int) -> dict[str, Any]:
    """The worst of each figure, and whether every goal is met: None where none is missed, but not all ``of`` are there.

    ``WORST`` has what a run without a figure counts as.
    """
    worst = {f"worst_{name}": _worst([r[name] for r in results], *how) for name, how in WORST.items()}
    missed = [str(TrackingCell.of(r)) for r in results if not meets_goals(r)]
    failed = [str(TrackingCell.of(r)) for r in results if r["failed"]]
    complete = len(results) == of
    goal_met = False if missed else True if complete else None
    counts = {"cells": len(results), "of": of, "complete": complete}
    return {**counts, **worst, "goals": GOALS, "missed": missed, "failed": failed, "goal_met": goal_met}


def _worst(values: list[float | None], extreme: Callable[..., float | None], missing: float | None) -> float | None:
    there = [missing if value is None else value for value in values]
    return extreme((value for value in there if value is not None), default=None)


def meets_goals(result: dict[str, Any]) -> bool:
    """Whether a run meets every goal that applies to it."""
    if result["settling"] is None or result["in_band"] < GOALS["in_band"]:
        return False
    at_most = ("settling", "overshoot", "raw", *(["recovery"] if result["recovery"] is not None else []))
    return all(result[name] is not None and result[name] <= GOALS[name] for name in at_most)
