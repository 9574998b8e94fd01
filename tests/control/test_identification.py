import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granite_scu.control import PI, Fixed, Measurement
from granite_scu.control.excitation import Excitation
from granite_scu.control.identification import (
    Fopdt,
    Plant,
    describe_step,
    effective,
    fit_fopdt,
    margins,
    respond,
    simc,
    simulate,
    step_response,
)
from granite_scu.control.setpoint_step import SetpointStep

GAINS = st.floats(-3, -0.5)
TAUS = st.floats(2, 15)
THETAS = st.floats(0, 4)
LAW = PI(setpoint=0.02)


def excitation(ticks: int, dwell: int = 4, amplitude: float = 0.5, seed: int = 0) -> np.ndarray:
    """ln lambda of a step test after 20 ticks of rest."""
    signs = Excitation(LAW, settle=2, amplitude=amplitude, dwell=dwell, seed=seed).signs(ticks // dwell + 1)
    return np.concatenate([np.zeros(20), amplitude * np.repeat(signs, dwell)])[:ticks]


# Model


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


# Fit


@settings(max_examples=6)
@given(
    gain=GAINS,
    tau=TAUS,
    theta=THETAS,
    drift=st.floats(-0.3, 0.3),
    rho=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 99),
)
def test_the_fit_recovers_the_plant_under_drift_and_noise(gain, tau, theta, drift, rho, seed):
    u = excitation(200, seed=seed)
    noise = np.zeros(200)
    white = np.random.default_rng(seed).normal(0, 0.01, 200)
    for k in range(1, 200):
        noise[k] = rho * noise[k - 1] + white[k]
    y = respond(Fopdt(gain, tau, theta), u) - 4 + drift * np.log(np.arange(200) + 1) + noise
    fit = fit_fopdt(u, y, start=10)

    # Five standard errors, and what a model that is wrong by a hundredth would lose: hypothesis searches for the worst.
    assert abs(fit.model.gain - gain) < 5 * fit.gain_se + 0.02 * abs(gain)
    assert abs(fit.model.tau - tau) < 5 * fit.tau_se + 0.02 * tau
    assert abs(fit.model.theta - theta) < 5 * fit.theta_se + 0.05
    assert fit.model.slope == pytest.approx(gain / tau, rel=0.3)
    assert fit.objection is None
    assert fit.r2 > 0.5


def test_without_noise_the_fit_is_exact():
    u = excitation(150)
    y = respond(Fopdt(-1.1, 6.5, 1.4), u) - 4 + 0.1 * np.log(np.arange(150) + 1)
    fit = fit_fopdt(u, y)
    assert (fit.model.gain, fit.model.tau, fit.model.theta) == pytest.approx((-1.1, 6.5, 1.4), rel=1e-3)
    assert (fit.offset, fit.drift) == pytest.approx((-4, 0.1), abs=1e-3)
    assert fit.r2 > 0.9999


def test_ticks_that_were_not_measured_are_passed_over():
    u = excitation(150)
    y = respond(Fopdt(-1.1, 6.5, 1.4), u) - 4
    y[[30, 31, 70]] = np.nan
    assert fit_fopdt(u, y).model.tau == pytest.approx(6.5, rel=1e-3)


def test_the_standard_errors_are_about_the_spread_of_the_estimates():
    """With residuals that hang together, where plain least squares would be several times too sure."""
    u, estimates, errors = excitation(200), [], []
    for seed in range(30):
        white = np.random.default_rng(seed).normal(0, 0.03, 200)
        noise = np.zeros(200)
        for k in range(1, 200):
            noise[k] = 0.9 * noise[k - 1] + white[k]
        fit = fit_fopdt(u, respond(Fopdt(-1, 6, 1), u) - 4 + noise)
        estimates.append(fit.model.gain)
        errors.append(fit.gain_se)
    assert 0.6 < np.std(estimates) / np.median(errors) < 1.7


@pytest.mark.parametrize("gain", [0.0, 0.8])
def test_a_lambda_without_the_right_effect_is_objected_to(gain):
    u, noise = excitation(160), np.random.default_rng(3).normal(0, 0.05, 160)
    fit = fit_fopdt(u, respond(Fopdt(gain, 6, 1), u) - 4 + noise)
    assert "no significant effect" in fit.objection


def test_a_poor_fit_is_objected_to():
    u, noise = excitation(400), np.random.default_rng(0).normal(0, 0.8, 400)
    fit = fit_fopdt(u, respond(Fopdt(-1.0, 4, 1), u) - 4 + noise)
    assert "explains only" in fit.objection


@pytest.mark.parametrize(
    ("u", "y", "words"),
    [
        (np.zeros(50), np.ones(50), "never changed"),
        (np.arange(5.0), np.arange(5.0), "only 5 measurements"),
        (np.arange(30.0), np.arange(20.0), "one length"),
    ],
)
def test_a_record_that_tells_nothing_is_refused(u, y, words):
    with pytest.raises(ValueError, match=words):
        fit_fopdt(u, y)


# Gains


@pytest.mark.parametrize(
    ("model", "kc", "tau_i"),
    [
        (Fopdt(1.0, 1.1, 0.1), 5.5, 0.8),  # his example E1, PI: 1 / ((s + 1)(0.2 s + 1)) after the half rule
        (Fopdt(1.0, 2.5, 1.47), 0.85, 2.5),  # his example E2, PI
    ],
)
def test_simc_gives_the_settings_of_skogestads_examples(model, kc, tau_i):
    gains = simc(model, tau_c=model.theta)
    assert (gains.kp, gains.tau_i) == (pytest.approx(kc, abs=5e-3), pytest.approx(tau_i))
    assert gains.ki == pytest.approx(kc / tau_i, abs=0.01)


@settings(max_examples=12)
@given(gain=st.floats(-10, -0.1), tau=st.floats(1, 100), theta=st.floats(0, 10))
def test_simc_leaves_good_margins_everywhere(gain, tau, theta):
    model = Fopdt(gain, tau, theta)
    gains = simc(effective(model))
    found = margins(model, gains.kp, gains.ki)
    assert found.stable
    assert found.gain > 2.0
    assert found.phase > 40


def test_gains_need_a_gain():
    with pytest.raises(ValueError, match="does nothing"):
        simc(Fopdt(0.0, 1.0, 1.0))


# Margins and response


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


def plain_loop(model: Fopdt, kp: float, ki: float, ticks: int) -> np.ndarray:
    """The PI law of docs/design.md and the plant, written out, from rest at 0 under a setpoint of 1."""
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


def test_a_simulated_controller_holds_still_at_rest():
    y, x, outputs = simulate(Fixed(setpoint=0.02, lambda_init=0.5), Fopdt(-1.0, 5.0), 20, (math.log(0.5), -3.0))
    assert y == pytest.approx(np.full(20, -3.0))
    assert x == pytest.approx(np.full(20, math.log(0.5)))
    assert outputs[-1].smoothed == pytest.approx(math.exp(-3.0))


# The controllers of the experiment


def seen(s: float) -> Measurement:
    return Measurement(s=s, data_bpt=2.0, param_bpt=0.1)


def drive(controller, values):
    state, outputs = controller.init(), []
    for s in values:
        state, output = controller.update(state, seen(s))
        outputs.append(output)
    return state, outputs


def test_the_excitation_settles_and_then_steps_around_where_it_settled():
    law = PI(setpoint=0.02, lambda_init=1.0)
    controller = Excitation(law, settle=10, amplitude=0.5, dwell=3, seed=1)
    values = [0.02 * math.exp(0.3 * math.sin(k)) for k in range(40)]
    state, outputs = drive(controller, values)
    _, alone = drive(law, values)
    assert outputs[:10] == alone[:10]
    level = np.mean([math.log(output.reg_strength) for output in alone[5:10]])
    assert state.level == pytest.approx(level)
    steps = [math.log(output.reg_strength) - level for output in outputs[10:]]
    assert np.abs(steps) == pytest.approx(np.full(30, 0.5))
    assert [math.copysign(1, value) for value in steps[::3]] == list(controller.signs(10))
    assert sum(controller.signs(10)) == 0


def test_the_excitation_steps_on_where_nothing_is_measured_and_stays_inside_the_bounds():
    controller = Excitation(PI(setpoint=0.02, lambda_max=0.6), settle=4, amplitude=5.0, dwell=1)
    _, outputs = drive(controller, [0.02] * 6 + [math.nan] * 6)
    assert {output.held for output in outputs[6:]} == {True}
    assert len({output.reg_strength for output in outputs[6:]}) == 2
    assert max(output.reg_strength for output in outputs) == 0.6


def test_the_setpoint_steps_at_its_tick():
    law = PI(setpoint=0.02, lambda_init=1.0, ema_alpha=1.0)
    _, outputs = drive(SetpointStep(law, at=3, factor=2.0), [0.02] * 6)
    assert [output.setpoint for output in outputs] == [0.02] * 3 + [0.04] * 3
    assert [output.error for output in outputs] == pytest.approx([0.0] * 3 + [-math.log(2)] * 3)


@pytest.mark.parametrize("controller", [Excitation(LAW, 4, 0.5, 2), SetpointStep(LAW, 3)])
def test_their_state_survives_a_checkpoint(controller):
    from dataclasses import asdict

    state, _ = drive(controller, [0.01, 0.02, 0.03, 0.02, 0.02])
    assert controller.restore(asdict(state)) == state


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Excitation(LAW, settle=1, amplitude=0.5, dwell=1), "settle 1"),
        (lambda: Excitation(LAW, settle=5, amplitude=0.0, dwell=1), "amplitude 0"),
        (lambda: Excitation(LAW, settle=5, amplitude=0.5, dwell=0), "dwell 0"),
        (lambda: SetpointStep(LAW, at=3, factor=60.0), "S\\* is a ratio"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_package_itself_stays_with_the_standard_library():
    code = "import sys, granite_scu.control; print({'numpy', 'scipy', 'control'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
