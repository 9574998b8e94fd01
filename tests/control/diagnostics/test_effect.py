"""Whether lambda is seen to move the adapter, on plants where it does and on such where it does not."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from granite_scu.control import PI, Measurement
from granite_scu.control.diagnostics.equilibrium import MIN_TICKS, Effect, Equilibrium
from granite_scu.control.laws.base import restored

SETPOINT = 0.1
SHOWN = -Equilibrium.min_effect


def score(gain: float, seed: int, ticks: int = 150) -> float:
    """A PI law on an S that goes back to S* by itself, with noise, and by ``gain`` where lambda sends it."""
    rng, law = np.random.default_rng(seed), PI(setpoint=SETPOINT, kp=1.0, ki=0.2, lambda_init=0.3)
    state, effect, log_s, lam = law.init(), Effect(), math.log(SETPOINT), 0.3
    for k in range(ticks):
        log_s += 0.3 * (math.log(SETPOINT) - gain * math.log(lam / 0.3) - log_s) + 0.02 * rng.normal()
        s, lr_sum = math.exp(log_s), 10.0 * (k + 1)
        data_bpt = 5.0 * math.exp(0.01 * rng.normal())
        param_bpt = 5.0 * s / (1 - s)
        seen = Measurement(param_bpt / (param_bpt + data_bpt), data_bpt, param_bpt, lr_sum=lr_sum)
        state, output = law.update(state, seen)
        lam = output.lam
        effect = effect.update(param_bpt, lam, lr_sum)
    return effect.score


def test_a_lambda_that_moves_nothing_is_seldom_taken_for_one_that_does():
    """The plant of zero gain: the law answers, S is in band, lambda does nothing. A bound on how often that passes."""
    assert sum(score(0.0, seed) <= SHOWN for seed in range(60)) <= 6


def test_a_lambda_that_moves_it_is_seen():
    assert sum(score(1.0, seed) <= SHOWN for seed in range(20)) >= 14


def series(seed=0, ticks=40):
    rng = np.random.default_rng(seed)
    return (
        np.exp(0.1 * rng.normal(size=ticks)),
        np.exp(0.3 * rng.normal(size=ticks)),
        np.cumsum(rng.uniform(1, 2, ticks)),
    )


def followed(values) -> Effect:
    effect = Effect()
    for value in zip(*values, strict=True):
        effect = effect.update(*map(float, value))
    return effect


def test_it_is_the_mean_of_two_t_values_of_least_squares():
    params, lams, lr_sum = series()
    speed, u, p = np.diff(np.sqrt(params)) / np.diff(lr_sum), np.log(lams), np.log(params)

    def t_value(*columns):
        x, y = np.column_stack([np.ones(len(speed) - 1), *columns]), speed[1:]
        found = np.linalg.lstsq(x, y, rcond=None)[0]
        left = y - x @ found
        return found[-1] / math.sqrt(left @ left / (len(y) - x.shape[1]) * np.linalg.inv(x.T @ x)[-1, -1])

    expected = (t_value(speed[:-1], p[1:-1], u[1:-1]) + t_value(speed[:-1], np.diff(u)[:-1])) / 2
    assert followed(series()).score == pytest.approx(expected, rel=1e-6)


def test_a_lambda_that_does_not_move_and_a_few_ticks_say_nothing():
    params, _, lr_sum = series()
    assert followed((params, np.full(40, 0.3), lr_sum)).score == 0.0
    few = followed(series(ticks=MIN_TICKS + 1))
    assert (few.count, few.score) == (MIN_TICKS - 1, 0.0)


@pytest.mark.parametrize("bad", [(math.nan, 0.3, 99.0), (0.0, 0.3, 99.0), (1.0, 0.0, 99.0), (1.0, 0.3, math.nan)])
def test_a_tick_that_says_nothing_interrupts_the_series(bad):
    effect = followed(series())
    after = effect.update(*bad)
    assert after.score == effect.score
    resumed = after.update(1.0, 0.3, 100.0).update(1.1, 0.3, 101.0)
    assert resumed.count == effect.count
    assert resumed.update(1.2, 0.4, 102.0).count == effect.count + 1


def test_a_tick_without_travel_is_passed_over():
    effect = followed(series())
    assert effect.update(1.0, 0.3, effect.last[1]) == effect


def test_it_survives_json():
    effect = followed(series())
    assert restored(Effect(), json.loads(json.dumps(asdict(effect)))) == effect
