"""The stopping rule, and everything that must not fool it."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from granite_scu.control import PI, Measurement, Output
from granite_scu.control.diagnostics.equilibrium import MIN_WINDOW, Equilibrium, Tick, from_mappings
from granite_scu.control.laws.base import as_stored

SETPOINT, WINDOW = 0.1, 30
RULE = Equilibrium(SETPOINT, WINDOW)


def settled(seed=0, ticks=WINDOW, noise=0.02, data_noise=0.01, fall=0.0) -> list[Tick]:
    """A PI law at its setpoint: S answers lambda, with noise; DataBPT is 5 bits, and falls by ``fall`` in all."""
    rng = np.random.default_rng(seed)
    law = PI(setpoint=SETPOINT, kp=1.0, ki=0.2, lambda_init=0.3)
    state, found, log_s = law.init(), [], math.log(SETPOINT)
    lam = 0.3
    for k in range(ticks):
        log_s += 0.3 * (math.log(SETPOINT) - 0.5 * math.log(lam / 0.3) - log_s) + noise * rng.normal()
        s = math.exp(log_s)
        state, output = law.update(state, _measured(s, lr_sum=10.0 * (k + 1)))
        lam = output.lam
        data_bpt = 5.0 * (1 + data_noise * rng.normal()) - fall * k / ticks
        found.append(_tick(k, output, data_bpt, lr_sum=10.0 * (k + 1)))
    return found


def _tick(k: int, output: Output, data_bpt: float, lr_sum: float) -> Tick:
    seen = {"saturated": output.saturated, "held": output.held, "in_deadband": False}
    return Tick(10 * k, output.smoothed, output.lam, data_bpt, **seen, authority=0.2, lr_sum=lr_sum, effect=-9.0)


def _measured(s: float, lr_sum: float) -> Measurement:
    return Measurement(s=s, data_bpt=5.0, param_bpt=5.0 * s / (1 - s), lr_sum=lr_sum)


def test_a_closed_loop_at_its_setpoint_with_flat_data_stops():
    decisions = [RULE.decide(settled(seed)) for seed in range(20)]
    assert sum(decision.stop for decision in decisions) >= 16, [d.reason for d in decisions]  # 95 %, one-sided
    reason = next(decision.reason for decision in decisions if decision.stop)
    assert "30 ticks" in reason and "no longer falls" in reason


@pytest.mark.parametrize("window", [MIN_WINDOW, 12])
def test_one_short_window_of_a_hundred_looks_like_an_answer_by_chance(window):
    rule, rng, taken, steady = Equilibrium(SETPOINT, window), np.random.default_rng(0), 0, settled(ticks=window)
    for _ in range(1000):
        errors, lams = 0.02 * rng.normal(size=window), 0.02 * rng.normal(size=window).cumsum()
        ticks = [replace(t, s=SETPOINT * math.exp(e), lam=math.exp(x))
                 for t, e, x in zip(steady, errors, lams, strict=True)]  # fmt: skip
        reason = rule.decide(ticks).reason
        taken += "does not answer to S" not in reason
    assert taken <= 20  # 10 expected, those with the wrong sign among them; three standard deviations


def assert_goes_on(ticks, words):
    decision = RULE.decide(ticks)
    assert not decision.stop and words in decision.reason


def at_one(index, **changed):
    """All ticks as they are but one."""
    return lambda k, tick: replace(tick, **changed) if k == index % WINDOW else tick


def at_all(**changed):
    return lambda k, tick: replace(tick, **changed)


REASONS = {
    "lambda frozen": (at_all(lam=0.3), "does not move"),
    "no controller, and S in band by accident": (at_all(lam=0.0, authority=0.0), "lambda is 0"),
    "one tick on a bound": (at_one(15, saturated=True), "saturated"),
    "one tick held": (at_one(15, held=True), "held"),
    "one tick in the deadband": (at_one(15, in_deadband=True), "in deadband"),
    **{f"authority {a}": (at_one(3, authority=a), "too weakly") for a in (0.0, 0.01, math.nan)},
    "a schedule": (lambda k, tick: replace(tick, lam=0.3 * (1 + math.cos(k / WINDOW))), "does not answer"),
    "the wrong sign": (lambda k, tick: replace(tick, lam=1 / tick.lam), "wrong sign"),
    "S frozen, lambda doing what it likes": (at_all(s=0.101), "does not answer"),
    **{f"lr_sum {t}": (at_all(lr_sum=t), "has not risen") for t in (0.0, math.nan, math.inf)},
    **{f"effect {e}": (at_one(-1, effect=e), "has not shown yet") for e in (0.0, -3.9, 9.0, math.nan)},
    **{f"one S of {s}": (at_one(-1, s=s), "out of band") for s in (None, 0.0, math.nan, 0.085, 0.12)},
    "a DataBPT that is not finite": (at_one(4, data_bpt=math.nan), "not finite"),
}


@pytest.mark.parametrize(("changed", "words"), REASONS.values(), ids=REASONS)
def test_a_run_goes_on_and_says_why(changed, words):
    assert_goes_on([changed(k, tick) for k, tick in enumerate(settled())], words)


def test_a_part_of_a_window_and_noise_alone_are_not_enough():
    assert_goes_on(settled(ticks=WINDOW - 1), "29 of 30")
    assert_goes_on(settled(data_noise=0.2), "noisy")


# Not a closed loop


@pytest.mark.parametrize("seed", range(10))
def test_a_lambda_replayed_from_another_run(seed):
    other = settled(seed + 100)
    ticks = [replace(tick, lam=o.lam) for tick, o in zip(settled(seed), other, strict=True)]
    assert_goes_on(ticks, "does not answer")


@pytest.mark.parametrize("law", [PI(SETPOINT), PI(SETPOINT, kp=1.0, ki=0.2)])
@pytest.mark.parametrize("seed", range(10))
def test_an_adapter_that_rests_because_the_learning_rate_is_over(law, seed):
    """ParamBPT stands still in the band, and lambda answers to the noise of DataBPT: it moves nothing by that."""
    rng, state, ticks = np.random.default_rng(seed), law.init(), []
    for k in range(3 * WINDOW):
        data_bpt, param_bpt, lr_sum = 5.0 * (1 + 0.01 * rng.normal()), 5.0 * SETPOINT / (1 - SETPOINT), 40.0 + 1e-3 * k
        s = param_bpt / (param_bpt + data_bpt)
        state, output = law.update(state, Measurement(s=s, data_bpt=data_bpt, param_bpt=param_bpt, lr_sum=lr_sum))
        ticks = [*ticks, replace(_tick(k, output, data_bpt, lr_sum), saturated=False)]
        assert not RULE.decide(ticks).stop
    assert_goes_on(ticks, "effect does not show")


@pytest.mark.parametrize(("ratio", "shows"), [(1.0, False), (1.11, False), (1.13, True), (3.0, True)])
def test_the_weights_must_have_travelled_far_enough_to_cross_the_band(ratio, shows):
    """From 0.09 to 0.11 the odds grow by 1.25: 0.118 of the first rise is enough, however long ago that was."""
    ticks = settled()
    span = [40 + (ratio - 1) * k / (WINDOW - 1) for k in range(WINDOW)]
    reason = RULE.decide([replace(tick, lr_sum=way) for tick, way in zip(ticks, span, strict=True)]).reason
    assert ("effect does not show" not in reason) == shows


def test_a_long_run_can_stop_late():
    ticks = next(ticks for seed in range(20) if RULE.decide(ticks := settled(seed)).stop)
    assert RULE.decide([replace(tick, lr_sum=tick.lr_sum + 4000.0) for tick in ticks]).stop


# Still learning


@pytest.mark.parametrize("seed", range(10))
def test_data_bits_that_still_fall_slowly(seed):
    assert not RULE.decide(settled(seed, data_noise=0.002, fall=0.05)).stop  # 1 % over the window, noise 0.2 %


@pytest.mark.parametrize("seed", range(10))
def test_a_fall_that_hides_in_noise_is_not_taken_for_none(seed):
    assert not RULE.decide(settled(seed, data_noise=0.1, fall=0.2)).stop


def test_data_bits_that_rise_do_stop_it():
    assert RULE.decide(settled(fall=-0.2)).stop


# The rest


def test_the_window_forgets_and_survives_json():
    ticks = ()
    for tick in settled(ticks=40):
        ticks = (*ticks, tick)[-WINDOW:]
    assert len(ticks) == WINDOW
    assert ticks[0].step == 100
    assert from_mappings(json.loads(json.dumps([as_stored(asdict(tick)) for tick in ticks]))) == ticks


def test_the_decision_looks_at_the_newest_window_only():
    good = settled(1)
    assert RULE.decide([replace(good[0], saturated=True)] * 5 + good) == RULE.decide(good)


@pytest.mark.parametrize("settings", [{"setpoint": 0.0, "window": 30}, {"setpoint": 0.1, "window": 7}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match="must"):
        Equilibrium(**settings)
