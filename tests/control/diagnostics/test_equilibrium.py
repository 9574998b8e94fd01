"""The stopping rule, and everything that must not fool it."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from granite_scu.control import PI, Integral, Measurement, Proportional
from granite_scu.control.diagnostics.equilibrium import MIN_WINDOW, Equilibrium, Tick, from_mappings

SETPOINT, WINDOW = 0.1, 30
RULE = Equilibrium(SETPOINT, WINDOW)


def settled(seed=0, ticks=WINDOW, noise=0.02, data_noise=0.01, fall=0.0, ema_alpha=0.5, **changed) -> list[Tick]:
    """A PI law at its setpoint: S answers lambda, with noise; DataBPT is 5 bits, and falls by ``fall`` in all."""
    rng = np.random.default_rng(seed)
    law = PI(setpoint=SETPOINT, kp=1.0, ki=0.2, ema_alpha=ema_alpha, lambda_init=0.3)
    state, found, log_s = law.init(), [], math.log(SETPOINT)
    strength = 0.3
    for k in range(ticks):
        log_s += 0.3 * (math.log(SETPOINT) - 0.5 * math.log(strength / 0.3) - log_s) + noise * rng.normal()
        s = math.exp(log_s)
        state, output = law.update(state, _measured(s, travel=10.0 * (k + 1)))
        strength = output.reg_strength
        data_bpt = 5.0 * (1 + data_noise * rng.normal()) - fall * k / ticks
        tick = Tick(
            10 * k,
            output.smoothed,
            strength,
            data_bpt,
            output.saturated,
            output.held,
            False,
            0.2,
            travel=10.0 * (k + 1),
            effect=-9.0,
        )
        found.append(replace(tick, **changed))
    return found


def _measured(s: float, travel: float) -> Measurement:
    return Measurement(s=s, data_bpt=5.0, param_bpt=5.0 * s / (1 - s), travel=travel)


def test_a_closed_loop_at_its_setpoint_with_flat_data_stops():
    decisions = [RULE.decide(settled(seed)) for seed in range(20)]
    assert sum(decision.stop for decision in decisions) >= 16, [d.reason for d in decisions]  # 95 %, one-sided
    reason = next(decision.reason for decision in decisions if decision.stop)
    assert "30 ticks" in reason and "no longer falls" in reason


@pytest.mark.parametrize("window", [MIN_WINDOW, 12])
def test_one_short_window_of_a_hundred_looks_like_an_answer_by_chance(window):
    rule, rng, taken, steady = Equilibrium(SETPOINT, window), np.random.default_rng(0), 0, settled(ticks=window)
    for _ in range(1000):
        errors, strengths = 0.02 * rng.normal(size=window), 0.02 * rng.normal(size=window).cumsum()
        ticks = [replace(t, s=SETPOINT * math.exp(e), reg_strength=math.exp(x))
                 for t, e, x in zip(steady, errors, strengths, strict=True)]  # fmt: skip
        reason = rule.decide(ticks).reason
        taken += "does not answer to S" not in reason
    assert taken <= 20  # 10 expected, those with the wrong sign among them; three standard deviations


def test_a_part_of_a_window_is_not_enough():
    decision = RULE.decide(settled(ticks=WINDOW - 1))
    assert not decision.stop
    assert "29 of 30" in decision.reason


def assert_goes_on(ticks, words, rule=RULE):
    decision = rule.decide(ticks)
    assert not decision.stop
    assert words in decision.reason


# Not a closed loop


def test_a_frozen_lambda():
    assert_goes_on([replace(tick, reg_strength=0.3) for tick in settled()], "does not move")


def test_no_controller_and_s_in_band_by_accident():
    assert_goes_on([replace(tick, reg_strength=0.0, authority=0.0) for tick in settled()], "lambda is 0")


@pytest.mark.parametrize("fault", ["saturated", "held", "in_deadband"])
def test_one_tick_of_the_window_on_a_bound_held_or_in_the_deadband(fault):
    ticks = settled()
    ticks[WINDOW // 2] = replace(ticks[WINDOW // 2], **{fault: True})
    assert_goes_on(ticks, fault.replace("_", " "))


@pytest.mark.parametrize("authority", [0.0, 0.01, math.nan])
def test_a_lambda_that_does_not_reach_the_gradient(authority):
    ticks = settled()
    ticks[3] = replace(ticks[3], authority=authority)
    assert_goes_on(ticks, "too weakly")


@pytest.mark.parametrize("seed", range(10))
def test_a_lambda_replayed_from_another_run(seed):
    other = settled(seed + 100)
    ticks = [replace(tick, reg_strength=o.reg_strength) for tick, o in zip(settled(seed), other, strict=True)]
    assert_goes_on(ticks, "does not answer")


def test_a_scheduled_lambda():
    ticks = [replace(t, reg_strength=0.3 * (1 + math.cos(k / WINDOW))) for k, t in enumerate(settled())]
    assert_goes_on(ticks, "does not answer")


def test_a_lambda_of_the_wrong_sign():
    ticks = [replace(tick, reg_strength=1 / tick.reg_strength) for tick in settled()]
    assert_goes_on(ticks, "wrong sign")


def test_a_frozen_measurement():
    """S that never moves, lambda integrating a constant error or doing what it likes."""
    ticks = [replace(tick, s=0.101) for tick in settled()]
    assert_goes_on(ticks, "does not answer")


@pytest.mark.parametrize(
    "law", [PI(SETPOINT), PI(SETPOINT, kp=1.0, ki=0.2), Proportional(SETPOINT), Integral(SETPOINT)]
)
@pytest.mark.parametrize("seed", range(10))
def test_an_adapter_that_rests_because_the_learning_rate_is_over(law, seed):
    """ParamBPT stands still in the band, and lambda answers to the noise of DataBPT: it moves nothing by that."""
    rng, state, ticks = np.random.default_rng(seed), law.init(), []
    for k in range(3 * WINDOW):
        data_bpt, param_bpt, travel = 5.0 * (1 + 0.01 * rng.normal()), 5.0 * SETPOINT / (1 - SETPOINT), 40.0 + 1e-3 * k
        s = param_bpt / (param_bpt + data_bpt)
        state, output = law.update(state, Measurement(s=s, data_bpt=data_bpt, param_bpt=param_bpt, travel=travel))
        tick = Tick(10 * k, output.smoothed, output.reg_strength, data_bpt, False, False, False, 0.2, travel, -9.0)
        ticks = RULE.remember(tuple(ticks), tick)
        assert not RULE.decide(ticks).stop
    assert_goes_on(ticks, "effect does not show")


@pytest.mark.parametrize(("ratio", "shows"), [(1.0, False), (1.11, False), (1.13, True), (3.0, True)])
def test_the_weights_must_have_travelled_far_enough_to_cross_the_band(ratio, shows):
    """From 0.09 to 0.11 the odds grow by 1.25: 0.118 of the first rise is enough, however long ago that was."""
    ticks = settled()
    span = [40 + (ratio - 1) * k / (WINDOW - 1) for k in range(WINDOW)]
    reason = RULE.decide([replace(tick, travel=way) for tick, way in zip(ticks, span, strict=True)]).reason
    assert ("effect does not show" not in reason) == shows


def test_a_long_run_can_stop_late():
    ticks = next(ticks for seed in range(20) if RULE.decide(ticks := settled(seed)).stop)
    assert RULE.decide([replace(tick, travel=tick.travel + 4000.0) for tick in ticks]).stop


def test_a_window_that_was_kept_in_another_form_begins_anew():
    mappings = [asdict(tick) for tick in settled()]
    assert from_mappings(mappings) == tuple(settled())
    assert from_mappings([{name: value for name, value in one.items() if name != "travel"} for one in mappings]) == ()


@pytest.mark.parametrize("travel", [0.0, math.nan, math.inf])
def test_a_travel_that_says_nothing(travel):
    assert_goes_on([replace(tick, travel=travel) for tick in settled()], "has not risen")


@pytest.mark.parametrize("effect", [0.0, -3.9, 9.0, math.nan])
def test_a_lambda_whose_effect_has_not_shown(effect):
    ticks = settled()
    assert_goes_on([*ticks[:-1], replace(ticks[-1], effect=effect)], "has not shown yet")


# Not at the setpoint


@pytest.mark.parametrize("s", [None, 0.0, math.nan, 0.085, 0.12])
def test_one_tick_out_of_band(s):
    ticks = settled()
    ticks[-1] = replace(ticks[-1], s=s)
    assert_goes_on(ticks, "out of band")


# Still learning


@pytest.mark.parametrize("seed", range(10))
def test_data_bits_that_still_fall_slowly(seed):
    assert not RULE.decide(settled(seed, data_noise=0.002, fall=0.05)).stop  # 1 % over the window, noise 0.2 %


@pytest.mark.parametrize("seed", range(10))
def test_a_fall_that_hides_in_noise_is_not_taken_for_none(seed):
    assert not RULE.decide(settled(seed, data_noise=0.1, fall=0.2)).stop


def test_noise_alone_is_not_equilibrium():
    assert_goes_on(settled(data_noise=0.2), "noisy")


def test_data_bits_that_are_not_finite():
    ticks = settled()
    ticks[4] = replace(ticks[4], data_bpt=math.nan)
    assert_goes_on(ticks, "not finite")


def test_data_bits_that_rise_do_stop_it():
    assert RULE.decide(settled(fall=-0.2)).stop


# The rest


def test_the_window_forgets_and_survives_json():
    ticks = ()
    for tick in settled(ticks=40):
        ticks = RULE.remember(ticks, tick)
    assert len(ticks) == WINDOW
    assert ticks[0].step == 100
    assert from_mappings(json.loads(json.dumps([asdict(tick) for tick in ticks]))) == ticks


def test_the_decision_looks_at_the_newest_window_only():
    good = settled(1)
    assert RULE.decide([replace(good[0], saturated=True)] * 5 + good) == RULE.decide(good)


@pytest.mark.parametrize("settings", [{"setpoint": 0.0, "window": 30}, {"setpoint": 0.1, "window": 7}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match="must"):
        Equilibrium(**settings)
