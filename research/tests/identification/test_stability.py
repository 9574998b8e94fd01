import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plants import GAINS, TAUS, THETAS

from research.identification.fopdt import Fopdt
from research.identification.simc import effective, simc
from research.identification.stability import margins
from research.identification.step_response import step_response


def swept_margins(model: Fopdt, kp: float, ki: float) -> tuple[float, float, float]:
    """Gain margin, phase margin and delay margin of the same loop from a frequency sweep, with nothing but numpy."""
    w = np.linspace(1e-4, math.pi, 20_000)
    z = np.exp(1j * w)
    whole = math.floor(model.theta)
    a, late = math.exp(-1 / model.tau), math.exp(-(1 - (model.theta - whole)) / model.tau)
    plant = -model.gain * ((1 - late) + (late - a) / z) / (z - a) / z**whole
    opened = plant * (kp + ki / (z - 1))
    phase, size = np.unwrap(np.angle(opened)), np.abs(opened)
    turned = np.flatnonzero(np.diff(np.floor((phase - math.pi) / (2 * math.pi))) != 0)
    upward = [1 / size[i] for i in turned if size[i] < 1]
    if opened[-1].real < 0 and size[-1] < 1:
        upward.append(1 / size[-1])
    crossing = np.flatnonzero(np.diff(np.sign(size - 1)) != 0)
    left = [math.remainder(phase[i] + math.pi, 2 * math.pi) for i in crossing]
    delay = min((value % (2 * math.pi)) / w[i] for value, i in zip(left, crossing, strict=True))
    return min(upward), math.degrees(min(left, key=abs)), delay


@settings(max_examples=8)
@given(gain=GAINS, tau=TAUS, theta=THETAS, tau_c=st.floats(2, 6))
def test_margins_agree_with_a_frequency_sweep(gain, tau, theta, tau_c):
    model = Fopdt(gain, tau, theta)
    gains = simc(effective(model), tau_c)
    found = margins(model, gains.kp, gains.ki)
    expected = swept_margins(model, gains.kp, gains.ki)
    assert (found.gain, found.phase, found.delay) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("excess", [0.9, 1.1])
def test_the_gain_margin_is_where_stability_ends(excess):
    model = Fopdt(-1.0, 6.0, 1.3)
    margin = margins(model, 1.5, 0.25).gain
    grown = Fopdt(model.gain * margin * excess, model.tau, model.theta)
    assert margins(grown, 1.5, 0.25).stable == (excess < 1)
    # And a plain simulation of the loop says the same.
    response = step_response(grown, 1.5, 0.25, ticks=400).response
    assert (np.abs(response[-20:] - 1).max() < 0.1) == (excess < 1)
