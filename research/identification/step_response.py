"""A closed loop's answer to a step of the setpoint: that of the linear loop, and the figures that describe any."""

from dataclasses import dataclass

import control as ct
import numpy as np
from numpy.typing import ArrayLike

from research.identification.fopdt import Array, Fopdt
from research.identification.stability import loop


@dataclass(frozen=True)
class Step:
    """A closed loop's answer to a step of the setpoint, in shares of the step.

    Attributes:
        response: (n,) from the tick of the step on; 0 before it, 1 at the new setpoint.
        rise: first tick at 90 % of the step; None where it never gets there.
        overshoot: peak minus 1, not negative.
        settling: first tick from which it stays within ``band``; None where it is not inside at the end.
    """

    response: Array
    rise: int | None
    overshoot: float
    settling: int | None


def describe_step(response: ArrayLike, band: float = 0.1) -> Step:
    """Rise, overshoot and settling of a response given in shares of the step; ``band`` is one too."""
    values = np.asarray(response, dtype=np.float64)
    risen = np.flatnonzero(values >= 0.9)
    outside = np.flatnonzero(~(np.abs(values - 1) <= band))
    settling = int(outside[-1]) + 1 if outside.size else 0
    return Step(
        response=values,
        rise=int(risen[0]) if risen.size else None,
        overshoot=max(float(np.nanmax(values)) - 1, 0.0),
        settling=settling if settling < len(values) else None,
    )


def step_response(model: Fopdt, kp: float, ki: float, ticks: int = 60, band: float = 0.1) -> Step:
    """Answer of the linear closed loop, in ln S, to a unit step of ln S*: python-control's, tick by tick."""
    _, response = ct.step_response(ct.feedback(loop(model, kp, ki), 1), T=np.arange(ticks))
    return describe_step(np.asarray(response), band)
