import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import UNUSABLE, check, run, seen

from granite_scu.control import PI, Cascade
from granite_scu.control.base import Measurement, Output
from granite_scu.control.cascade import PROBED_SCALE, best_log_scale


def at(odds: float, saved: tuple[float, float] | None = None, travel: float = 5.0) -> Measurement:
    """S of these odds at a DataBPT of 2."""
    return Measurement(s=odds / (1 + odds), data_bpt=2.0, param_bpt=2.0 * odds, travel=travel, saved=saved)


def odds_of(output: Output) -> float:
    assert output.setpoint is not None
    return output.setpoint / (1 - output.setpoint)


def test_it_starts_as_pi_at_a_small_setpoint():
    law, pi = Cascade(start=0.05), PI(setpoint=0.05)
    course = [at(0.01, travel=1.0), at(0.03, travel=2.0), at(0.05, travel=3.0)]
    assert law.initial_strength == pytest.approx(pi.initial_strength)
    for output, expected in zip(run(law, course)[1], run(pi, course)[1], strict=True):
        assert output.setpoint == pytest.approx(0.05)
        assert output.reg_strength == pytest.approx(expected.reg_strength)


def on_parabola(slope: float, bend: float) -> tuple[float, float]:
    """V(x) = slope x - bend x^2 at 1 and at the scale that is probed."""
    return slope - bend, slope * PROBED_SCALE - bend * PROBED_SCALE**2


@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_best_scale_is_that_of_the_parabola(slope, bend):
    assert best_log_scale(*on_parabola(slope, bend)) == pytest.approx(math.log(slope / (2 * bend)), abs=1e-6)


def test_where_no_finite_scale_is_best_it_says_in_which_direction():
    assert best_log_scale(*on_parabola(1.0, 0.0)) > 10
    assert best_log_scale(*on_parabola(1.0, -0.5)) == math.inf
    assert best_log_scale(*on_parabola(-1.0, 0.5)) == -math.inf


def test_the_setpoint_goes_to_where_scaling_changes_nothing():
    """ParamBPT, and nearly the odds, are the square of the scale."""
    law = Cascade(rate=1.0, limit=5.0, start=0.02)
    state, _ = run(law, [at(0.02)])
    for scale in (0.5, 0.9, 1.0, 1.3):
        _, (output,) = run(law, [at(0.02, on_parabola(2.0 * scale, 1.0))], state)
        assert odds_of(output) == pytest.approx(state.odds * scale**2)


def test_it_moves_by_no_more_than_the_limit():
    law = Cascade(rate=1.0, limit=0.5, start=0.02)
    state, _ = run(law, [at(state_odds := 0.02 / 0.98)])
    for saved, change in (((1.0, 0.8), 0.5), ((-1.0, 0.5), -0.5)):
        _, (output,) = run(law, [at(state_odds, saved)], state)
        assert odds_of(output) == pytest.approx(state_odds * math.exp(change))


def test_the_setpoint_does_not_run_away_from_an_s_that_cannot_follow():
    law = Cascade(limit=1.0)
    state, _ = run(law, [at(0.05), *[at(0.05, (1.0, 0.8))] * 20])
    assert state.odds == pytest.approx(0.05 * math.e)


@pytest.mark.parametrize(("slope", "bend"), [(0.9, 0.3), (0.5, 0.5), (0.3, 0.05)])
def test_it_finds_the_best_of_a_curve_it_does_not_know(slope, bend):
    """An adapter whose scale is the root of the odds, and an S that follows S* at once."""
    law, scale = Cascade(), 0.1
    state = law.init()
    for _ in range(40):
        saved = on_parabola(slope * scale, bend * scale**2)
        state, output = law.update(state, at(scale**2, saved))
        scale = odds_of(output) ** 0.5
    assert scale == pytest.approx(slope / (2 * bend), rel=0.02)


def test_measurements_that_are_not_finite_are_not_heeded():
    law = Cascade()
    state, _ = run(law, [at(0.1)])
    for saved in ((math.nan, 0.1), (0.1, math.nan), (math.inf, 0.1)):
        assert run(law, [at(0.1, saved)], state)[0].odds == state.odds


NUMBERS = st.one_of(st.floats(-20, 20), st.sampled_from(UNUSABLE))
SAVED = st.one_of(st.none(), st.tuples(NUMBERS, NUMBERS))
USABLE = st.builds(at, st.floats(1e-6, 1e6), SAVED, st.floats(0, 1e3))
UNSEEN = [replace(seen(s), saved=saved) for s in (0.0, *UNUSABLE) for saved in (None, (0.5, 0.1))]
COURSES = st.lists(st.one_of(USABLE, st.sampled_from(UNSEEN)), max_size=30)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.1, 10), st.floats(0.1, 3), st.floats(0.05, 1), COURSES)
def test_invariants(rate, limit, alpha, course):
    law = Cascade(rate=rate, limit=limit, ema_alpha=alpha, lambda_min=0.01, lambda_max=10.0)
    check(law, course, 0.01, 10.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"start": 0.0},
        {"rate": 0.0},
        {"limit": math.inf},
        {"ema_alpha": 0.0},
        {"lambda_min": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Cascade(**bad)
