"""A simulated adapter that rises from nothing and has a lag of its own, as the gain schedule supposes."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from granite_scu.control import Controller, Measurement, Output
from research.identification.fopdt import Array, Fopdt

DATA_BPT = 2.0


class Rising:
    """The norm w of an update that Adam moves by at most w* / tau a tick, w* being the norm that S* implies:

        dw/dt = max(1 - w / w_rest, -1) / tau      2 ln w_rest = K (u - u*) + disturbance      w* = 1, u = ln lambda

    So ParamBPT = P* w^2 begins as P* (t / tau)^2, and near w* the model is what lies between u and ln ParamBPT. Time
    runs with the learning rate: at half the rate tau takes twice the ticks. Mutable, for simulations.

    Args:
        model: K, tau and theta at the first tick's learning rate.
        level: u*, which holds S*.
        log_lam: u before the first tick.
    """

    def __init__(self, model: Fopdt, level: float, log_lam: float) -> None:
        self.model, self.level = model, level
        self.past = [log_lam] * (math.floor(model.theta) + 2)  # inputs, newest first
        self.w = 0.0

    def tick(self, log_lam: float, disturbance: float, rate: float) -> None:
        """A tick under the lambdas that were set theta ticks before it; ``rate`` is in multiples of the first."""
        self.past = [log_lam, *self.past[:-1]]
        late = self.model.theta - math.floor(self.model.theta)  # for this share of the tick the older one acts
        for acting, share in ((self.past[-1], late), (self.past[-2], 1 - late)):
            rest = math.exp((self.model.gain * (acting - self.level) + disturbance) / 2)
            reach = share * rate / self.model.tau
            self.w = max(self.w * math.exp(-reach / rest) - rest * math.expm1(-reach / rest), self.w - reach)


def steer(
    controller: Controller[Any],
    model: Fopdt,
    ticks: int,
    *,
    miss: float = 0.0,
    noise: ArrayLike = 0.0,
    disturbance: ArrayLike = 0.0,
    rates: ArrayLike = 1.0,
) -> tuple[Array, Array, list[Output]]:
    """Run a controller, as it is and with all its limits, on a plant that rises from S = 0.

    Args:
        controller: the law; its setpoint is S*.
        model: the plant about S*.
        ticks: how long; each ends in a measurement.
        miss: ln of the lambda that holds S* over the law's first.
        noise: (ticks,) in ln DataBPT, where all noise of S is; nan fails the measurement.
        disturbance: (ticks,) added to the ln ParamBPT at which the plant would rest.
        rates: (ticks,) learning rate, in multiples of the first tick's.

    Returns:
        (ticks,) ln(ParamBPT / P*), the error in the logit of S without the noise; (ticks,) ln lambda; the outputs.
    """
    assert controller.setpoint is not None
    sought = DATA_BPT * controller.setpoint / (1 - controller.setpoint)
    start = math.log(controller.lambda_start)
    plant, state, lr_sum = Rising(model, start + miss, start), controller.init(), 0.0
    errors, log_lam, outputs = [], [start], []
    courses = [
        np.broadcast_to(np.asarray(course, dtype=np.float64), ticks).tolist() for course in (noise, disturbance, rates)
    ]
    for added, pushed, rate in zip(*courses, strict=True):
        plant.tick(log_lam[-1], pushed, rate)
        lr_sum += rate
        data_bpt, param_bpt = DATA_BPT * math.exp(added), sought * plant.w**2
        s = param_bpt / (data_bpt + param_bpt)
        measured = Measurement(s=s, data_bpt=data_bpt, param_bpt=param_bpt, lr_sum=lr_sum)
        state, output = controller.update(state, measured)
        errors.append(2 * math.log(plant.w))
        log_lam.append(math.log(output.lam))
        outputs.append(output)
    return np.array(errors), np.array(log_lam[1:]), outputs
