"""How well a run was controlled, from its history alone."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

RISEN = 0.9
"""The ratio of the smoothed S to its setpoint that counts as risen."""

Points = Sequence[tuple[int, float]]
"""Steps, ascending, each with the ratio of the smoothed S to its setpoint there."""


def summarise(history: Sequence[Mapping[str, Any]], band: float = 0.1) -> dict[str, float | None]:
    """The control metrics of a run, each a finite number or None where it is undefined.

    Of a record it reads ``step``, ``s_ema``, ``s_target``, ``lambda``, ``saturated`` and ``held``; the second and third
    may be None. In band means: the smoothed S lies within ``band`` of the setpoint, relative to it. A held record
    repeats an S that was not measured then: it is out of band, and no metric of S counts it otherwise.

    rise_time             step at which the smoothed S first reached 90 % of the setpoint
    settling_time         first step from which it stayed in band to the end
    overshoot             its peak over the setpoint, minus 1, once it has crossed it
    iae                   |ln(smoothed S / setpoint)|, averaged over the steps since it was first defined
    in_band               fraction of records in band, from the first that was
    in_band_second_half   fraction of records in band, of the later half of them all
    saturated, held       fraction of records so marked
    held_ticks            number of records marked held: of ticks whose measurement was not usable
    actuator_travel       sum of |change of ln lambda|; undefined for a lambda of 0
    """
    points = ratios(history)
    held = [record["held"] for record in history]
    inside = [in_band(ratio, band) for ratio in map(_ratio, history)]
    # Counted from the first record in band: from the settling time on, the fraction would be 1 by definition.
    since_entry = inside[inside.index(True) :] if True in inside else []
    return {
        "rise_time": rise_time(points),
        "settling_time": settling_time([(r["step"], _ratio(r)) for r in history], band),
        "overshoot": overshoot(points),
        "iae": integral_absolute_error(points),
        "in_band": _fraction(since_entry),
        "in_band_second_half": _fraction(inside[len(inside) // 2 :]) if points else None,
        "saturated": _fraction([record["saturated"] for record in history]),
        "held": _fraction(held),
        "held_ticks": sum(held),
        "actuator_travel": actuator_travel([record["lambda"] for record in history]),
    }


def ratios(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Each record's step with the ratio of its smoothed S to its setpoint, where both are there and it is not held."""
    found = ((record["step"], _ratio(record)) for record in history)
    return [(step, ratio) for step, ratio in found if ratio is not None]


def in_band(ratio: float | None, band: float) -> bool:
    """Whether a ratio of S to its setpoint lies within ``band`` of 1; where there is none, it does not."""
    return ratio is not None and 1 - band <= ratio <= 1 + band


def rise_time(points: Points) -> int | None:
    """The first step at which S has reached 90 % of the setpoint."""
    return next((step for step, ratio in points if ratio >= RISEN), None)


def settling_time(points: Sequence[tuple[int, float | None]], band: float) -> int | None:
    """The first step from which S stays in band to the end. A tick without a ratio is out of band."""
    settled = None
    for step, ratio in reversed(points):
        if not in_band(ratio, band):
            break
        settled = step
    return settled


def overshoot(points: Points) -> float | None:
    """The peak of S over the setpoint, minus 1; None if S never reached the setpoint."""
    peak = max((ratio for _, ratio in points), default=0.0)
    return peak - 1 if peak >= 1 else None


def integral_absolute_error(points: Points) -> float | None:
    """The integral of |ln ratio| over steps, by trapezoids, divided by the steps it spans."""
    if not points or points[0][0] == points[-1][0]:
        return None
    area = sum((abs(math.log(a)) + abs(math.log(b))) / 2 * (n - m) for (m, a), (n, b) in pairwise(points))
    return area / (points[-1][0] - points[0][0])


def actuator_travel(lams: Sequence[float]) -> float | None:
    """The sum of |change of ln lambda|; None for fewer than two lambdas, or one that has no logarithm."""
    if len(lams) < 2 or min(lams) <= 0:
        return None
    return sum(abs(math.log(b / a)) for a, b in pairwise(lams))


def _ratio(record: Mapping[str, Any]) -> float | None:
    smoothed, setpoint = record["s_ema"], record["s_target"]
    usable = not record["held"] and _is_positive(smoothed) and _is_positive(setpoint)
    return smoothed / setpoint if usable else None


def _is_positive(value: float | None) -> bool:
    return value is not None and 0 < value < math.inf


def _fraction(marks: Sequence[bool]) -> float | None:
    return sum(marks) / len(marks) if marks else None
