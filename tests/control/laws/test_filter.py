import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.control.laws.base import Measurement
from granite_scu.control.laws.filter import Ema, read

VALUES = st.lists(st.floats(-20, 20), min_size=1, max_size=50)
ALPHA = st.floats(0.01, 1)


def average(values: list[float], alpha: float) -> float:
    ema = Ema()
    for value in values:
        ema = ema.update(value, alpha)
    assert ema.value is not None
    return ema.value


@given(VALUES, ALPHA)
def test_it_equals_adams_corrected_moment(values, alpha):
    moment = 0.0
    for value in values:
        moment = (1 - alpha) * moment + alpha * value
    expected = moment / (1 - (1 - alpha) ** len(values))
    assert math.isclose(average(values, alpha), expected, rel_tol=1e-9, abs_tol=1e-9)


def seen(s: float) -> Measurement:
    return Measurement(s=s, data_bpt=2.0, param_bpt=0.1)


def test_a_reading_smooths_ln_s_and_compares_it_with_the_setpoint():
    first = read(Ema(), seen(0.01), alpha=0.5, setpoint=0.02)
    assert (first.valid, first.smoothed, first.error) == (True, pytest.approx(0.01), pytest.approx(-math.log(2)))
    second = read(first.ema, seen(0.08), alpha=0.5, setpoint=0.02)
    assert (second.smoothed, second.error) == (pytest.approx(0.04), pytest.approx(math.log(2)))


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf])
def test_a_reading_without_a_logarithm_leaves_the_filter_alone(bad):
    before = read(Ema(), seen(0.01), alpha=0.5, setpoint=0.02)
    assert read(before.ema, seen(bad), alpha=0.5, setpoint=0.02) == before._replace(valid=False)
    assert read(Ema(), seen(bad), alpha=0.5, setpoint=0.02) == (Ema(), False, None, None)
