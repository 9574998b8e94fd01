import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plants import GAINS, TAUS, THETAS, excitation

from research.identification.fopdt import Fopdt, respond
from research.identification.fopdt_fit import fit_fopdt


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
    assert abs(fit.model.gain - gain) < 5 * fit.standard_errors["gain"] + 0.02 * abs(gain)
    assert abs(fit.model.tau - tau) < 5 * fit.standard_errors["tau"] + 0.02 * tau
    assert abs(fit.model.theta - theta) < 5 * fit.standard_errors["theta"] + 0.05
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
        errors.append(fit.standard_errors["gain"])
    assert 0.6 < np.std(estimates) / np.median(errors) < 1.7


@pytest.mark.parametrize("gain", [0.0, 0.8])
def test_a_lambda_without_the_right_effect_is_objected_to(gain):
    u, noise = excitation(160), np.random.default_rng(3).normal(0, 0.05, 160)
    fit = fit_fopdt(u, respond(Fopdt(gain, 6, 1), u) - 4 + noise)
    assert "no significant effect" in fit.objection


def test_a_dead_time_on_its_bound_is_cautioned_of():
    u = excitation(150)
    inside, beyond = (fit_fopdt(u, respond(Fopdt(-1.1, 6.5, theta), u) - 4, max_theta=4) for theta in (3.0, 8.0))
    assert inside.caution is None
    assert "the largest that was looked for, 4 ticks" in beyond.caution


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
