"""A model of the plant, and runs on it.

The plant is what lambda does to S: u = ln lambda goes in, y = ln S comes out, time counts in ticks.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.signal import lfilter

from granite_scu.control.laws.base import Controller, Measurement, Output, require

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Fopdt:
    """First order plus dead time: G(s) = K e^(-theta s) / (tau s + 1).

    Attributes:
        gain: K, change of ln S per change of ln lambda once all has settled; negative for our plant.
        tau: time constant, in ticks.
        theta: dead time, in ticks; it comes on top of the tick that lies between an output and the next measurement.
    """

    gain: float
    tau: float
    theta: float = 0.0

    def __post_init__(self) -> None:
        require(math.isfinite(self.gain), f"gain {self.gain}: must be finite")
        require(0 < self.tau < math.inf, f"tau {self.tau}: must be positive and finite")
        require(0 <= self.theta < math.inf, f"theta {self.theta}: must be finite and not negative")

    @property
    def slope(self) -> float:
        """K / tau, change of ln S per tick right after a unit step: all that matters to a loop much faster than tau."""
        return self.gain / self.tau


def sampled(model: Fopdt) -> tuple[float, float, float, int]:
    """(a, b0, b1, d) of the model under an input that holds between ticks; exact.

    y[k+1] = a y[k] + b0 u[k-d] + b1 u[k-d-1] with d = floor(theta), f = theta - d, a = e^(-1/tau),
    b0 = K (1 - e^(-(1-f)/tau)) and b1 = K (e^(-(1-f)/tau) - a): for the first f of a tick the older input acts.
    Åström and Wittenmark, "Computer-Controlled Systems" (1997), section 2.3.
    """
    whole = math.floor(model.theta)
    pole = math.exp(-1 / model.tau)
    late = math.exp(-(1 - (model.theta - whole)) / model.tau)
    return pole, model.gain * (1 - late), model.gain * (late - pole), whole


def respond(model: Fopdt, u: ArrayLike) -> Array:
    """(n,) the plant's output at each tick for inputs set at each tick, (n,), from the rest that u[0] keeps."""
    inputs = np.asarray(u, dtype=np.float64)
    a, b0, b1, d = sampled(model)
    padded = np.concatenate([np.full(d + 1, inputs[0]), inputs])
    driven = b0 * padded[1 : len(inputs) + 1] + b1 * padded[: len(inputs)]  # what acts on the tick after k
    rest = model.gain * inputs[0]
    return np.concatenate([[rest], lfilter([1.0], [1.0, -a], driven[:-1], zi=[a * rest])[0]])


class Plant:
    """The model as something to steer: give it ln lambda, take ln S a tick later. Mutable, for simulations.

    Args:
        model: how it responds.
        at: (ln lambda, ln S) of the rest from which it starts.
    """

    def __init__(self, model: Fopdt, at: tuple[float, float]) -> None:
        self.a, self.b0, self.b1, d = sampled(model)
        self.at = at
        self.past = [0.0] * (d + 2)  # inputs, newest first
        self.y = 0.0

    def tick(self, log_lam: float) -> float:
        """ln S a tick after lambda was set."""
        self.past = [log_lam - self.at[0], *self.past[:-1]]
        self.y = self.a * self.y + self.b0 * self.past[-2] + self.b1 * self.past[-1]
        return self.at[1] + self.y


def simulate(
    controller: Controller[Any], model: Fopdt, ticks: int, at: tuple[float, float], noise: ArrayLike | None = None
) -> tuple[Array, Array, list[Output]]:
    """Run a controller, as it is and with all its limits, on a simulated plant.

    Args:
        controller: the law.
        model: the plant.
        ticks: how long.
        at: (ln lambda, ln S) of the rest from which the plant starts.
        noise: (ticks,) added to each measured ln S.

    Returns:
        (ticks,) ln S without the noise, (ticks,) ln lambda, and the controller's outputs.
    """
    plant, state, y = Plant(model, at), controller.init(), at[1]
    added = np.zeros(ticks) if noise is None else np.asarray(noise, dtype=np.float64)
    log_s, log_lam, outputs = [], [], []
    for k in range(ticks):
        # A huge step of an unstable loop may leave what S can be; the plant saturates there as the real S does.
        s = min(math.exp(max(y + float(added[k]), -700.0)), 0.999) if math.isfinite(added[k]) else math.nan
        measured = Measurement(s=s, data_bpt=1.0, param_bpt=s / (1 - s), lr_sum=float(k + 1))
        state, output = controller.update(state, measured)
        log_s.append(y)
        log_lam.append(math.log(output.lam))
        outputs.append(output)
        y = plant.tick(log_lam[-1])
    return np.array(log_s), np.array(log_lam), outputs
