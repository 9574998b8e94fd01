"""The verdict on a closed loop, on simulated ones and on responses with one thing wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest

from granite_scu.control import PI
from research.identification.agreement import MODEL_ERROR, REST, Agreement, compare
from research.identification.fopdt import Fopdt, simulate
from research.identification.fopdt_fit import Fit
from research.identification.setpoint_step import SetpointStep
from research.identification.simc import effective, simc

TICKS, FACTOR, LEVEL = 40, 1.5, math.log(1.2)
SPAN = math.log(FACTOR)
PLANT = Fopdt(-1.15, 3.5, 0.55)  # the embedded model's at S* = 2 %
GAINS = simc(effective(PLANT))
LAW = PI(setpoint=0.02, kp=GAINS.kp, ki=GAINS.ki, lambda_init=math.exp(LEVEL))


def fitted(noise: float) -> Fit:
    """A fit that found the plant as it is, and so much noise in ln S."""
    return Fit(
        model=PLANT,
        standard_errors={"gain": 0.08, "tau": 0.3, "theta": 0.1, "slope": 0.03},
        offset=0.0,
        drift=0.0,
        r2=0.9,
        noise=noise,
        correlation=0.5,
        fitted=np.zeros(1),
        start=0,
        max_theta=12.0,
    )


def measured(plant: Fopdt = PLANT, noise: float = 0.03, seed: int = 1) -> np.ndarray:
    """(TICKS,) of the law on that plant, in shares of the step; the noise is white."""
    added = np.random.default_rng(seed).normal(0, noise, REST + TICKS)
    rest = (LEVEL, math.log(LAW.setpoint))
    _, _, outputs = simulate(SetpointStep(LAW, REST, FACTOR), plant, REST + TICKS, rest, added)
    return np.array([math.log(output.smoothed / LAW.setpoint) / SPAN for output in outputs[REST:]])


def judge(response: np.ndarray, noise: float = 0.03) -> Agreement:
    return compare(response, LAW, fitted(noise), LEVEL, FACTOR, band=0.1 / SPAN)[0]


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.06])
def test_a_loop_that_is_as_the_model_has_it_agrees_also_under_noise(noise):
    found = judge(measured(noise=noise), noise)
    assert found.as_predicted, found.words
    assert "agrees" in found.words


def test_without_noise_the_prediction_is_the_simulation_of_the_very_law():
    found = judge(measured(noise=0.0), noise=0.0)
    assert max(map(abs, found.difference.values())) < 1e-9
    assert found.allowed == MODEL_ERROR


def oscillating(response: np.ndarray) -> np.ndarray:
    return response + 0.35 * np.sin(2 * math.pi * np.arange(TICKS) / 9)


def overshooting(response: np.ndarray) -> np.ndarray:
    peak = int(np.argmax(response >= 0.9))
    return np.concatenate([response[:peak], [1.4, 1.6, 1.4, 1.2], response[peak + 4 :]])


@pytest.mark.parametrize(
    ("spoil", "excess", "words"),
    [
        (oscillating, "swing", "then it swung about that by 2"),
        (overshooting, "overshoot", "more than predicted"),
        (lambda response: response + 0.3 * (np.arange(TICKS) >= 3), "offset", "% of the step beyond it"),
        (lambda response: response - 0.3 * (np.arange(TICKS) >= 3), "offset", "% of the step short of it"),
        (lambda response: np.minimum(np.arange(TICKS) / 15, 1.0), "transient", "on its way"),
    ],
    ids=["oscillation without end", "overshoot", "too high", "too low", "too slow"],
)
def test_one_thing_wrong_is_seen_though_the_rest_is_as_predicted(spoil, excess, words):
    quiet = measured(noise=0.0)
    found = judge(spoil(quiet))
    assert np.sqrt(np.mean((spoil(quiet) - quiet) ** 2)) < 0.35
    assert found.as_predicted is False
    assert excess in found.excess and words in found.words


@pytest.mark.parametrize(
    "plant", [replace(PLANT, gain=6 * PLANT.gain), replace(PLANT, theta=4.0)], ids=["gain", "dead time"]
)
def test_a_plant_on_which_the_law_oscillates_is_not_what_was_predicted(plant):
    response = measured(plant)
    assert np.std(response[-15:]) > 0.25  # it does oscillate
    found = judge(response)
    assert found.as_predicted is False
    assert "swing" in found.excess


def test_noise_that_would_hide_an_oscillation_leaves_it_undecided():
    found = judge(measured(noise=0.2), noise=0.2)
    assert found.as_predicted is None
    assert "--step_test.step" in found.words


def test_noise_widens_what_agrees_and_is_no_excuse_for_everything():
    quiet, noisy = judge(measured(), 0.01), judge(measured(), 0.06)
    assert all(a < b for a, b in zip(quiet.allowed.values(), noisy.allowed.values(), strict=True))
    assert judge(measured(noise=0.06) + 0.35 * np.sin(np.arange(TICKS)), 0.06).as_predicted is False


def test_ticks_that_were_not_measured_are_passed_over_and_none_measured_is_no_agreement():
    response = measured()
    response[[2, 20]] = math.nan
    assert judge(response).as_predicted
    silent = Agreement(MODEL_ERROR | {"swing": math.nan}, dict.fromkeys(MODEL_ERROR, 0.0), split=4)
    assert silent.as_predicted is False
