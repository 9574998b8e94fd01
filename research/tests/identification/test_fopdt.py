import math

import numpy as np
import pytest
from hypothesis import given
from plants import GAINS, TAUS, THETAS, excitation

from granite_scu.control import Fixed
from research.identification.fopdt import Fopdt, Plant, respond, simulate


@given(gain=GAINS, tau=TAUS, theta=THETAS)
def test_the_sampled_model_is_the_continuous_one(gain, tau, theta):
    """The answer to a step is K (1 - e^(-(t - theta) / tau)), for any fraction of a tick in theta."""
    u = np.concatenate([[0.0], np.ones(30)])
    late = np.maximum(np.arange(31) - 1 - theta, 0)
    assert respond(Fopdt(gain, tau, theta), u) == pytest.approx(gain * (1 - np.exp(-late / tau)), abs=1e-9)


@given(gain=GAINS, tau=TAUS, theta=THETAS)
def test_the_plant_that_ticks_is_the_plant_that_responds(gain, tau, theta):
    u, model = excitation(60), Fopdt(gain, tau, theta)
    plant = Plant(model, at=(0.0, -4.0))
    ticked = [-4.0, *[plant.tick(value) for value in u[:-1]]]
    assert ticked == pytest.approx(-4.0 + respond(model, u), abs=1e-9)


def test_a_simulated_controller_holds_still_at_rest():
    y, x, outputs = simulate(Fixed(setpoint=0.02, lambda_init=0.5), Fopdt(-1.0, 5.0), 20, (math.log(0.5), -3.0))
    assert y == pytest.approx(np.full(20, -3.0))
    assert x == pytest.approx(np.full(20, math.log(0.5)))
    assert outputs[-1].smoothed == pytest.approx(math.exp(-3.0))
