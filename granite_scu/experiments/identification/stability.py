"""How far a linear loop is from instability: that of given gains on a model of the plant, and the published law's."""

import math
from dataclasses import dataclass

import control as ct
import numpy as np

from granite_scu.control.laws.base import require
from granite_scu.control.laws.original import Original
from granite_scu.experiments.identification.fopdt import Array, Fopdt, sampled


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
    gains, phases, at = _crossings(opened)
    poles = ct.feedback(opened, 1).poles()
    upward = [value for value in gains if 1 < value < math.inf]
    crossings = [
        (float(value), float(w)) for value, w in zip(phases, at, strict=True) if math.isfinite(value) and w > 0
    ]
    phase, crossover = min(crossings, key=lambda pair: abs(pair[0])) if crossings else (None, None)
    delays = [math.radians(value % 360) / w for value, w in crossings]
    return Margins(
        stable=bool(np.all(np.abs(poles) < 1)),
        gain=min(upward, default=None),
        phase=phase,
        delay=min(delays, default=None),
        crossover=crossover,
    )


def stability_limit(law: Original, tau: float, theta: float = 0.0) -> float:
    """The |dS / d ln lambda| beyond which the loop of the published law about S* is unstable.

    That of the linear loop: small swings, but outside the deadband, in which lambda does not move at all; bounds and
    ``integral_limit`` are not met. With a plant of first order and dead time, S falling by g in all for a unit of
    ln lambda, sampled at the ticks as in ``sampled``, the open loop is

        L(z) = g (b0 z + b1) / (z^(d+1) (z - a)) . alpha z / (z - 1 + alpha) . z / (z - 1) . (Kp + Ki z / (z - leak))

    It is stable for a small g, and up to the first at which L(e^iw) = -1 for some w.

    At the published gains, for plants that answer within the tick, with the lag and dead time that ``identify`` found
    on the embedded model at S* = 2 % (in ticks of four steps), and with ten ticks of lag:

    >>> [round(stability_limit(Original(), tau, theta), 4) for tau, theta in ((0.01, 0.0), (3.5, 0.55), (10.0, 0.55))]
    [0.0095, 0.0046, 0.0025]

    Args:
        law: of which the gains, the filter and the leak count.
        tau: time constant of the plant, in ticks.
        theta: its dead time, in ticks.

    Raises:
        ValueError: without a leak there are two integrators, and no gain that is small enough.
    """
    require(law.leak < 1, f"leak {law.leak}: must be below 1 for the loop to have a limit")
    z = ct.tf("z")
    a, b0, b1, d = sampled(Fopdt(1.0, tau, theta))
    plant = (b0 * z + b1) / (z ** (d + 1) * (z - a))
    smoothing = law.ema_alpha * z / (z - 1 + law.ema_alpha)
    opened = plant * smoothing * z / (z - 1) * (law.kp + law.ki * z / (z - law.leak))
    return min(value for value in _crossings(opened)[0] if 0 < value < math.inf)


def _crossings(opened: ct.TransferFunction) -> tuple[list[float], Array, Array]:
    """Factors at which a sampled open loop passes through -1, phases in degrees, and radians per tick of the latter."""
    # On samples of the frequency response: the search among polynomial roots loses crossings, dead time being that many
    # poles at the origin.
    response = ct.frd(opened, np.geomspace(1e-4, math.pi, 1500), smooth=True)
    gains, phases, _, _, at, _ = ct.stability_margins(response, returnall=True)
    # A sampled loop may also turn over at the Nyquist frequency itself, where L is real; a root search misses the end.
    nyquist = float(np.real(opened(-1.0)))
    return [float(value) for value in gains] + ([-1 / nyquist] if nyquist < 0 else []), phases, at
