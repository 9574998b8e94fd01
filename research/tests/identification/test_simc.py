import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.identification.fopdt import Fopdt
from research.identification.simc import effective, simc
from research.identification.stability import margins


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
