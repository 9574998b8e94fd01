import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import UNUSABLE, check, run, seen

from granite_scu.control import PI, Cascade
from granite_scu.control.base import Measurement, Output


def at(odds: float, saved: tuple[float, float] | None = None, travel: float = 5.0) -> Measurement:
    """S of these odds at a DataBPT of 2."""
    return Measurement(s=odds / (1 + odds), data_bpt=2.0, param_bpt=2.0 * odds, travel=travel, saved=saved)


def odds_of(output: Output) -> float:
    assert output.setpoint is not None
    return output.setpoint / (1 - output.setpoint)


def calibrated(law: Cascade, carry_over: float = 0.8, odds: float = 0.02):
    """The state after the measurements that give a, S having these odds."""
    state, _ = run(law, [at(odds), *[at(odds, (0.1, 0.1 * carry_over))] * law.calibration])
    return state


def test_it_starts_as_pi_at_a_small_setpoint():
    law, pi = Cascade(start=0.05), PI(setpoint=0.05)
    course = [at(0.01, travel=1.0), at(0.03, travel=2.0), at(0.05, travel=3.0)]
    assert law.initial_strength == pytest.approx(pi.initial_strength)
    for output, expected in zip(run(law, course)[1], run(pi, course)[1], strict=True):
        assert output.setpoint == pytest.approx(0.05)
        assert output.reg_strength == pytest.approx(expected.reg_strength)


def test_the_carry_over_of_a_small_adapter_is_the_reference():
    law = Cascade(calibration=2)
    state, outputs = run(law, [at(0.02), at(0.02, (0.1, 0.09)), at(0.02, (0.2, 0.16))])
    assert state.reference == pytest.approx(0.8)  # the second measurement's
    assert odds_of(outputs[-1]) == pytest.approx(0.02 / 0.98)


def test_the_step_is_what_the_model_asks_for():
    """With r = V / (a T) memorised is 1 - r, and the best T is T times 0.5 / (1 - r)."""
    law = Cascade(rate=1.0, limit=5.0)
    state = calibrated(law)
    for relative in (0.9, 0.75, 0.5, 0.25, 0.0, -1.0):
        _, (output,) = run(law, [at(0.02, (1.0, 0.8 * relative))], state)
        assert odds_of(output) == pytest.approx(state.odds * 0.5 / (1 - relative))


def test_it_moves_by_no_more_than_the_limit_a_decade():
    law = Cascade(limit=1.0)
    state = calibrated(law)
    for held_out, change in ((0.8, math.e), (0.9, math.e), (-100.0, 1 / math.e)):
        _, (output,) = run(law, [at(0.02, (1.0, held_out))], state)
        assert odds_of(output) == pytest.approx(state.odds * change, rel=0.03)  # S has odds of 0.02, S* of 0.0204


def test_the_setpoint_does_not_run_away_from_an_s_that_cannot_follow():
    law = Cascade(rate=10.0, limit=1.0)
    state, _ = run(law, [at(0.02, (1.0, 0.8))] * 20, calibrated(law))
    assert state.odds == pytest.approx(0.02 * math.e)


def test_it_finds_the_best_of_a_curve_it_does_not_know():
    """T grows with the odds and V = a T - c T^2: whatever a and c, the held-out saving ends near its largest."""
    for a, c in ((0.9, 0.3), (0.5, 0.5), (0.3, 0.05)):
        law, odds = Cascade(), 0.02
        state = law.init()
        for _ in range(60):
            saved = odds**0.5
            held_out = a * saved - c * saved**2
            state, output = law.update(state, at(odds, (saved, held_out)))
            odds = min(odds_of(output), 1e3)
        # Its a is measured at the start, where c has taken something already.
        assert held_out > 0.95 * a**2 / (4 * c)


def test_measurements_that_are_not_finite_are_not_heeded():
    law = Cascade()
    state = calibrated(law)
    for saved in ((math.nan, 0.1), (0.1, math.nan), (0.0, 0.1), (-0.1, 0.1), (math.inf, 0.1)):
        after, _ = run(law, [at(0.02, saved)], state)
        assert (after.odds, after.heard) == (state.odds, state.heard)


NUMBERS = st.one_of(st.floats(-20, 20), st.sampled_from(UNUSABLE))
SAVED = st.one_of(st.none(), st.tuples(NUMBERS, NUMBERS))
USABLE = st.builds(at, st.floats(1e-6, 1e6), SAVED, st.floats(0, 1e3))
UNSEEN = [replace(seen(s), saved=saved) for s in (0.0, *UNUSABLE) for saved in (None, (0.5, 0.1))]
COURSES = st.lists(st.one_of(USABLE, st.sampled_from(UNSEEN)), max_size=30)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.1, 0.9), st.floats(0.1, 10), st.floats(0.1, 3), st.floats(0.05, 1), COURSES)
def test_invariants(share, rate, limit, alpha, course):
    law = Cascade(share=share, rate=rate, limit=limit, ema_alpha=alpha, lambda_min=0.01, lambda_max=10.0)
    check(law, course, 0.01, 10.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"share": 1.0},
        {"start": 0.0},
        {"calibration": 0},
        {"rate": 0.0},
        {"limit": math.inf},
        {"ema_alpha": 0.0},
        {"lambda_min": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Cascade(**bad)
