import numpy as np
import pytest
from hypothesis import given, settings
from plants import GAINS, TAUS, THETAS

from research.identification.fopdt import Fopdt, Plant
from research.identification.simc import effective, simc
from research.identification.step_response import describe_step, step_response


def plain_loop(model: Fopdt, kp: float, ki: float, ticks: int) -> np.ndarray:
    """The PI law of docs/develop/mathematics.md and the plant, written out, from rest at 0 under a setpoint of 1."""
    plant = Plant(model, (0.0, 0.0))
    y = integral = 0.0
    seen = []
    for _ in range(ticks):
        error = y - 1.0
        seen.append(y)
        x = integral + kp * error
        integral += ki * error
        y = plant.tick(x)
    return np.array(seen)


@settings(max_examples=8)
@given(gain=GAINS, tau=TAUS, theta=THETAS)
def test_the_step_response_is_that_of_a_plain_loop(gain, tau, theta):
    model = Fopdt(gain, tau, theta)
    gains = simc(effective(model))
    linear = step_response(model, gains.kp, gains.ki).response
    assert linear == pytest.approx(plain_loop(model, gains.kp, gains.ki, 60), abs=1e-6)


def test_a_described_step_has_literal_numbers():
    step = describe_step([0.0, 0.5, 0.95, 1.3, 1.05, 0.98, 1.0])
    assert (step.rise, step.overshoot, step.settling) == (2, pytest.approx(0.3), 4)
    never = describe_step([0.0, 0.2, 0.4])
    assert (never.rise, never.overshoot, never.settling) == (None, 0.0, None)
