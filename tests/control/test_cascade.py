import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import UNUSABLE, check, run, seen

from granite_scu.control import Cascade
from granite_scu.control.base import Measurement, Output


def at(odds: float, validation: float | None = None, travel: float = 5.0) -> Measurement:
    """S of these odds at a DataBPT of 2."""
    return Measurement(
        s=odds / (1 + odds), data_bpt=2.0, param_bpt=2.0 * odds, travel=travel, validation_bpt=validation
    )


def setpoint_odds(output: Output) -> float:
    assert output.setpoint is not None
    return output.setpoint / (1 - output.setpoint)


def test_s_is_free_while_validation_falls():
    law = Cascade(lambda_min=1e-4)
    _, outputs = run(law, [at(0.1 * k, validation=5.0 - 0.1 * k) for k in range(1, 9)])
    assert [output.reg_strength for output in outputs] == [1e-4] * 8
    assert all(output.setpoint is None and not output.saturated for output in outputs)
    assert law.initial_strength == 1e-4


def test_at_the_turn_s_is_called_back_to_where_validation_was_best():
    """A validation at the second tick saw the adapter of the first, and so on: a tick comes after its validation."""
    law = Cascade()
    course = [at(0.1), at(0.2, 5.0), at(0.4, 4.8), at(0.8, 4.7), at(1.6, 4.9)]
    _, outputs = run(law, course)
    assert [output.setpoint is None for output in outputs] == [True] * 4 + [False]
    assert setpoint_odds(outputs[-1]) == pytest.approx(0.4)  # S's own when validation was 4.7
    assert outputs[-1].reg_strength > 100 * law.lambda_min


def test_after_the_turn_the_setpoint_follows_validation():
    law = Cascade(down=0.5, up=1.5, tolerance=1e-3)
    turned, _ = run(law, [at(0.1), at(0.2, 5.0), at(0.4, 4.7), at(0.4, 4.9)])
    assert turned.odds == pytest.approx(0.2)
    there, _ = run(law, [at(0.2)], turned)
    after = {value: run(law, [at(0.2, value)], there)[1][0] for value in (5.0, 4.901, 4.8, 4.6)}
    assert setpoint_odds(after[5.0]) == pytest.approx(0.5 * 0.2)
    assert setpoint_odds(after[4.901]) == pytest.approx(0.2)  # within the tolerance of 4.9
    assert setpoint_odds(after[4.8]) == pytest.approx(0.2)  # recovers, and is not the best
    assert setpoint_odds(after[4.6]) == pytest.approx(1.5 * 0.2)
    # S at 0.4 is still on its way down: the rise is not the setpoint's doing.
    above, _ = run(law, [at(0.5)], turned)
    assert setpoint_odds(run(law, [at(0.4, 5.0)], above)[1][0]) == pytest.approx(0.2)
    # From where S is, when it lies below the setpoint: what S cannot follow is not asked for.
    below, _ = run(law, [at(0.05)], turned)
    assert setpoint_odds(run(law, [at(0.05, 4.6)], below)[1][0]) == pytest.approx(1.5 * 0.05)


def test_between_validations_it_is_pi_at_that_setpoint():
    law = Cascade()
    turned, _ = run(law, [at(0.1), at(0.2, 5.0), at(0.4, 4.7), at(0.4, 4.9)])
    course = [at(0.3, travel=6.0), at(0.25, travel=7.0), at(0.2, travel=8.0)]
    _, outputs = run(law, course, turned)
    inner = law._inner(0.2 / 1.2)
    _, expected = run(inner, course, turned.law)
    assert outputs == [replace(output, setpoint=inner.setpoint) for output in expected]


def test_the_free_rise_leaves_no_integral():
    law = Cascade()
    state, _ = run(law, [at(0.01 * 1.5**k, travel=5.0 + k) for k in range(20)])
    assert state.law.integral == state.law.bias == 0.0


def test_a_validation_that_is_not_finite_is_not_heeded():
    law = Cascade()
    turned, _ = run(law, [at(0.1), at(0.2, 5.0), at(0.4, math.nan), at(0.4, math.inf)])
    assert (turned.odds, turned.best, turned.previous) == (None, 5.0, 5.0)


def test_an_unusable_measurement_is_held():
    law = Cascade()
    state, _ = run(law, [at(0.1), at(0.2, 5.0), at(0.4, 4.9)])
    _, (held,) = run(law, [seen(math.nan)], state)
    assert held.held and held.reg_strength == law.lambda_min


VALIDATIONS = st.one_of(st.none(), st.floats(0.1, 20), st.sampled_from([math.nan, math.inf, 0.0]))
USABLE = st.builds(at, st.floats(1e-6, 1e6), VALIDATIONS, st.floats(0, 1e3))
COURSES = st.lists(st.one_of(USABLE, st.sampled_from([seen(s) for s in (0.0, *UNUSABLE)])), max_size=30)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.05, 0.95), st.floats(1.01, 3), st.floats(0.05, 1), COURSES)
def test_invariants(down, up, alpha, course):
    law = Cascade(ema_alpha=alpha, down=down, up=up, lambda_min=0.01, lambda_max=10.0)
    check(law, course, 0.01, 10.0)


@pytest.mark.parametrize(
    "bad", [{"tolerance": -1.0}, {"down": 1.0}, {"up": 1.0}, {"up": math.inf}, {"ema_alpha": 0.0}, {"lambda_min": 0.0}]
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Cascade(**bad)
