"""How far the linear loop of given gains on a model of the plant is from instability."""

import math
from dataclasses import dataclass

import control as ct
import numpy as np

from research.identification.fopdt import Array, Fopdt, sampled


@dataclass(frozen=True)
class Margins:
    """How far a loop is from instability. None: infinite.

    Attributes:
        stable: whether the closed loop is; the other values say little where it is not.
        gain: factor by which the plant's gain may grow.
        phase: in degrees.
        delay: dead time that may come on top, in ticks.
        crossover: frequency of the smallest phase margin, in radians per tick.
    """

    stable: bool
    gain: float | None
    phase: float | None
    delay: float | None
    crossover: float | None


def loop(model: Fopdt, kp: float, ki: float) -> ct.TransferFunction:
    """The open loop L(z), one tick a sample: minus the sampled plant, times Kp + Ki / (z - 1). Limits are left out.

    No filter is in it: the law smooths DataBPT alone, which lambda hardly moves.
    """
    a, b0, b1, d = sampled(model)
    plant = ct.TransferFunction([-b0, -b1], [1, -a, *[0] * (d + 1)], 1)  # (b0 z + b1) / (z^(d+1) (z - a))
    law = ct.TransferFunction([kp, ki - kp], [1, -1], 1)
    return plant * law


def margins(model: Fopdt, kp: float, ki: float) -> Margins:
    """Gain, phase and delay margin of the loop, exact for the sampled loop. See ``loop``.

    The gain margin is the factor upwards; the smallest of several crossings counts.
    """
    opened = loop(model, kp, ki)
    gains, phases, at = crossings(opened)
    poles = ct.feedback(opened, 1).poles()
    upward = [value for value in gains if 1 < value < math.inf]
    found = [(float(value), float(w)) for value, w in zip(phases, at, strict=True) if math.isfinite(value) and w > 0]
    phase, crossover = min(found, key=lambda pair: abs(pair[0])) if found else (None, None)
    delays = [math.radians(value % 360) / w for value, w in found]
    return Margins(
        stable=bool(np.all(np.abs(poles) < 1)),
        gain=min(upward, default=None),
        phase=phase,
        delay=min(delays, default=None),
        crossover=crossover,
    )


def crossings(opened: ct.TransferFunction) -> tuple[list[float], Array, Array]:
    """Factors at which a sampled open loop passes through -1, phases in degrees, and radians per tick of the latter."""
    # On samples of the frequency response: the search among polynomial roots loses crossings, dead time being that many
    # poles at the origin.
    response = ct.frd(opened, np.geomspace(1e-4, math.pi, 1500), smooth=True)
    gains, phases, _, _, at, _ = ct.stability_margins(response, returnall=True)
    # A sampled loop may also turn over at the Nyquist frequency itself, where L is real; a root search misses the end.
    nyquist = float(np.real(opened(-1.0)))
    return [float(value) for value in gains] + ([-1 / nyquist] if nyquist < 0 else []), phases, at
