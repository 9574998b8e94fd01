import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import UNUSABLE, check, run, seen

from granite_scu.control import PI, Cascade
from granite_scu.control.base import Measurement, Output
from granite_scu.control.cascade import PROBED_SCALE, parabola


def at(odds: float, saved: tuple[float, float] | None = None, travel: float = 5.0, pull: float = 0.0) -> Measurement:
    """S of these odds at a DataBPT of 2."""
    s = odds / (1 + odds)
    return Measurement(s=s, data_bpt=2.0, param_bpt=2.0 * odds, travel=travel, pull=pull, saved=saved)


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


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_the_parabola_goes_through_what_was_measured(slope, bend):
    assert parabola(*on_parabola(slope, bend)) == pytest.approx((slope, bend), abs=1e-9)


def test_the_setpoint_moves_by_what_lambda_pulls_beyond_what_is_memorised():
    """Held-out text pulls with 1 - 2 * 0.3 = 0.4 of a, the training text with more and more."""
    law = Cascade(rate=2.0, limit=5.0)
    state, (output,) = run(law, [at(0.1, pull=0.4)])
    against = 2 * output.reg_strength * 0.2
    for training in (0.4, 0.4 + against, 0.4 + 3 * against):
        # The mean of the two ticks since the start counts.
        _, (output,) = run(law, [at(0.1, on_parabola(1.0, 0.3), pull=2 * training - 0.4)], state)
        surplus = min(against, training) - (training - 0.4)
        assert odds_of(output) == pytest.approx(state.odds * math.exp(2.0 * surplus))


def test_noise_in_the_weights_pulls_on_both_texts_and_cancels():
    law = Cascade()
    state, _ = run(law, [at(0.1)])
    courses = [[at(0.1, on_parabola(1.0, 0.3 + noise), pull=2 * (0.4 - 2 * noise))] for noise in (0.0, 0.05)]
    without, with_noise = (run(law, course, state)[1][0] for course in courses)
    assert with_noise.setpoint == pytest.approx(without.setpoint)
    assert with_noise.setpoint != pytest.approx(0.1)


def test_it_moves_by_no_more_than_the_limit():
    law = Cascade(limit=0.1)
    state, _ = run(law, [at(1 / 9)])
    for training, change in ((-5.0, 0.1), (5.0, -0.1)):
        _, (output,) = run(law, [at(1 / 9, on_parabola(1.0, 0.3), pull=training)], state)
        assert odds_of(output) == pytest.approx(state.odds * math.exp(change))
    _, (output,) = run(law, [at(1 / 9, on_parabola(-1.0, 0.3))], state)  # held-out text only loses
    assert odds_of(output) == pytest.approx(state.odds * math.exp(-0.1))


def test_the_setpoint_does_not_run_away_from_an_s_that_cannot_follow():
    law = Cascade(limit=1.0)
    state, _ = run(law, [at(0.05), *[at(0.05, (1.0, 0.8))] * 20])
    assert state.odds == pytest.approx(0.05 * math.e)


def train(law: Cascade, slope: float, bend: float, ticks: int) -> tuple[float, float]:
    """The size and lambda after so many ticks of a plant in one dimension.

    Training saves x - 0.02 x^2 at size x, held-out text slope x - bend x^2, and ParamBPT is 2 x^2. The size at which
    training and lambda balance is approached with a lag.
    """
    state, strength, size = law.init(), law.initial_strength, 0.05
    for tick in range(ticks):
        size += 0.1 * (1 / (2 * (0.02 + 2 * strength)) - size)
        saved = on_parabola(slope * size, bend * size**2) if tick % 8 == 7 else None
        pull = size - 2 * 0.02 * size**2
        state, output = law.update(state, at(size**2, saved, travel=tick + 1.0, pull=pull))
        strength = output.reg_strength
    return size, strength


@pytest.mark.parametrize(("slope", "bend"), [(0.9, 0.3), (0.5, 0.5), (0.3, 0.2)])
def test_it_finds_the_best_of_a_curve_it_does_not_know(slope, bend):
    size, _ = train(Cascade(), slope, bend, ticks=800)
    assert size == pytest.approx(slope / (2 * bend), rel=0.01)


def test_without_memorising_lambda_goes_to_its_lower_bound():
    _, strength = train(Cascade(lambda_min=1e-4), 1.0, 0.02, ticks=400)
    assert strength == pytest.approx(1e-4)


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
