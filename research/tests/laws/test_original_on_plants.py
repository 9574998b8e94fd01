"""The published law on simulated plants: unstable beyond what theory says, stable below, and what that comes to at the
setpoints of docs/research/tracking.md.

A plant here is dS / d ln lambda = -g, so K = -g / S* in ln S. The law's deadband and its limits hide the linear loop
from two sides: swings within the deadband are left alone, and large ones are cut off. So the linear claims are of
small swings without a deadband, and the published law stands beside them, whole.
"""

import math
from dataclasses import replace

import control as ct
import numpy as np
import pytest
from rising import steer

from research.identification.fopdt import Fopdt, sampled, simulate
from research.identification.stability import crossings
from research.laws.original import Original

PUBLISHED = Original()
LINEAR = replace(PUBLISHED, setpoint=0.5, deadband=0.0, lambda_min=1e-30, lambda_max=1e30)
WHOLE = replace(LINEAR, deadband=PUBLISHED.deadband)
EMBEDDED = (3.5, 0.55)
"""(tau, theta) that ``identify`` found on the embedded model at S* = 2 %, in ticks of four steps."""
PLANTS = [(0.3, 0.2), EMBEDDED, (10.0, 0.5), (20.0, 2.3)]


def opened(law: Original, tau: float, theta: float, g: float) -> ct.TransferFunction:
    """The open loop about S*, with a plant of first order and dead time whose S falls by g for a unit of ln lambda.

        L(z) = g (b0 z + b1) / (z^(d+1) (z - a)) . alpha z / (z - 1 + alpha) . z / (z - 1) . (Kp + Ki z / (z - leak))

    The deadband, the bounds of lambda and the limit of the integral are left out.
    """
    z = ct.tf("z")
    a, b0, b1, d = sampled(Fopdt(g, tau, theta))
    plant = (b0 * z + b1) / (z ** (d + 1) * (z - a))
    smoothing = law.ema_alpha * z / (z - 1 + law.ema_alpha)
    return plant * smoothing * z / (z - 1) * (law.kp + law.ki * z / (z - law.leak))


def stability_limit(law: Original, tau: float, theta: float = 0.0) -> float:
    """The g up to which the linear loop is stable: the first at which L(e^iw) = -1 for some w. Needs a leak below 1."""
    return min(value for value in crossings(opened(law, tau, theta, 1.0))[0] if 0 < value < math.inf)


def dominant(tau: float, theta: float, g: float) -> complex:
    """The largest pole of the closed loop, from python-control."""
    poles = ct.feedback(opened(PUBLISHED, tau, theta, g), 1).poles()
    return complex(poles[np.argmax(np.abs(poles))])


def swings(law: Original, tau: float, theta: float, g: float, off: float, ticks: int = 3000) -> np.ndarray:
    """The largest |S - S*| between one crossing of S* and the next; S begins at S* + ``off``."""
    rest = (math.log(law.lambda_start), math.log(law.setpoint + off))
    log_s, _, _ = simulate(law, Fopdt(-g / law.setpoint, tau, theta), ticks, rest)
    errors = np.exp(log_s) - law.setpoint
    crossings = np.flatnonzero(np.diff(np.sign(errors)) != 0) + 1
    return np.array([np.abs(part).max() for part in np.split(errors, crossings)[1:-1]])


# Theory


@pytest.mark.parametrize(("tau", "theta"), PLANTS)
def test_the_poles_leave_the_unit_circle_at_the_limit(tau, theta):
    limit = stability_limit(PUBLISHED, tau, theta)
    assert abs(dominant(tau, theta, 0.999 * limit)) < 1 < abs(dominant(tau, theta, 1.001 * limit))
    for ratio in (0.03, 0.3, 3, 30, 100):
        assert (abs(dominant(tau, theta, ratio * limit)) > 1) == (ratio > 1)


def test_the_limit_is_a_hundredth_at_most_and_falls_as_the_plant_lags():
    limits = [stability_limit(PUBLISHED, tau) for tau in (0.01, 0.3, 1, 3.5, 10, 40)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == pytest.approx(0.0095, abs=1e-4)
    assert stability_limit(PUBLISHED, *EMBEDDED) == pytest.approx(0.0046, abs=1e-4)
    # Two lags in a row and two integrators, in continuous time: Routh's criterion.
    lag, leak = 9 + 40 + 0.5, 1 - PUBLISHED.leak
    routh = leak * (1 + leak * lag) / (lag * PUBLISHED.ki - PUBLISHED.kp)
    assert limits[-1] == pytest.approx(routh, rel=0.1)


def test_without_the_leak_no_gain_is_small_enough():
    nearly = [stability_limit(replace(PUBLISHED, leak=1 - share), *EMBEDDED) for share in (1e-3, 1e-4)]
    assert nearly == pytest.approx([1e-3, 1e-4], rel=0.2)


# The law itself


@pytest.mark.parametrize("ratio", [0.3, 0.8, 1.25, 3.0])
@pytest.mark.parametrize(("tau", "theta"), PLANTS)
def test_swings_grow_beyond_the_limit_and_fade_below_it_as_fast_as_the_poles_say(tau, theta, ratio):
    g = ratio * stability_limit(PUBLISHED, tau, theta)
    pole = dominant(tau, theta, g)
    found = swings(LINEAR, tau, theta, g, off=5e-4)
    small = found[found < 0.01]  # the limit of the integral is not met
    growth = (small[-1] / small[1]) ** (1 / (len(small) - 2))
    assert (growth > 1) == (ratio > 1)
    assert growth == pytest.approx(abs(pole) ** (math.pi / abs(np.angle(pole))), rel=0.02)


@pytest.mark.parametrize(("tau", "theta"), PLANTS)
def test_with_its_deadband_they_fade_into_it_below_the_limit_and_grow_to_its_other_limits_beyond_twice_that(tau, theta):
    limit = stability_limit(PUBLISHED, tau, theta)
    below = swings(WHOLE, tau, theta, limit, off=0.02)
    assert (np.diff(below) < 0).all() and len(below) < 10  # it came to rest
    beyond = swings(WHOLE, tau, theta, 2 * limit, off=0.02)
    assert beyond[-1] > 1.2 * beyond[0] and len(beyond) > 10  # it did not


# The cells of docs/research/tracking.md


GAIN = -1.17
"""K in the logit of S, as identified."""
CELLS = {0.004: (0.3, 3.2), 0.02: (0.7, 1.05), 0.1: (1.4, 0.35), 0.5: (4.7, 0.08)}
"""(tau in ticks of ten steps, the lambda that holds S*), at each S*."""
WARM_UP = [0.28, 0.78]
"""Of twenty steps: the mean learning rate of the first two ticks, as shares of the peak."""


def cell(setpoint: float, ticks: int, **changes: float) -> tuple[np.ndarray, np.ndarray]:
    """S over S*, and lambda, of the published law on an adapter that rises from nothing; each (ticks,)."""
    tau, holding = CELLS[setpoint]
    law = replace(PUBLISHED, setpoint=setpoint, **changes)
    rates = np.ones(ticks)
    rates[:2] = WARM_UP
    errors, log_lam, _ = steer(law, Fopdt(GAIN, tau, 0.2), ticks, miss=math.log(holding), rates=rates)
    odds = setpoint / (1 - setpoint) * np.exp(errors)
    return odds / (1 + odds) / setpoint, np.exp(log_lam)


@pytest.mark.parametrize(("setpoint", "ratio"), [(0.004, 0.5), (0.02, 2.7), (0.1, 14.8), (0.5, 70.7)])
def test_what_theory_says_of_the_setpoints(setpoint, ratio):
    g = -GAIN * setpoint * (1 - setpoint)
    assert g / stability_limit(PUBLISHED, CELLS[setpoint][0], 0.2) == pytest.approx(ratio, rel=0.02)


def test_at_the_lowest_setpoint_it_is_stable_and_fails_for_its_bound():
    s, lam = cell(0.004, 1000)
    assert (lam[50:] == PUBLISHED.lambda_max).all()
    assert s[50:] == pytest.approx(np.full(950, s[-1])) and s[-1] > 1.5
    s, lam = cell(0.004, 1000, lambda_max=100.0)  # with room it settles, in a deadband as wide as S*
    assert lam[-500:] == pytest.approx(np.full(500, lam[-1]))
    assert abs(s[-1] - 1) * 0.004 <= PUBLISHED.deadband


def test_at_two_per_cent_it_swings_for_longer_than_a_run_and_may_be_caught_by_its_deadband():
    s, lam = cell(0.02, 600)
    assert s[10:70].max() > 1.4 and s[70:140].min() < 0.7 and s[140:210].max() > 1.3
    assert lam[-200:] == pytest.approx(np.full(200, lam[-1]))
    s, _ = cell(0.02, 600, deadband=0.0)
    assert s[-300:].max() > 1.8 and s[-300:].min() < 0.6


@pytest.mark.parametrize(("setpoint", "low", "high"), [(0.1, 0.2, 3.0), (0.5, 0.2, 1.7)])
def test_at_the_higher_setpoints_it_swings_for_good(setpoint, low, high):
    s, lam = cell(setpoint, 1000)
    for part in np.split(s[100:], 3):
        assert part.max() > high and part.min() < low
    assert lam[-300:].max() == PUBLISHED.lambda_max
