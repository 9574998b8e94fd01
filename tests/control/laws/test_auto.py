import math
import random
from dataclasses import asdict, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invariants import run

from granite_scu.control import PI, AutoSetpoint
from granite_scu.control.laws.auto import START, WINDOW, best_scale, level, rise
from granite_scu.control.laws.base import Measurement, Output, Slopes, restored


def at(odds: float, slopes: Slopes | None = None, travel: float = 5.0) -> Measurement:
    """S of these odds at a DataBPT of 2."""
    return Measurement(s=odds / (1 + odds), data_bpt=2.0, param_bpt=2.0 * odds, travel=travel, slopes=slopes)


def odds_of(output: Output) -> float:
    assert output.setpoint is not None
    return output.setpoint / (1 - output.setpoint)


def course(slope: float, noise: float = 0.0, count: int = 40, rise: float = 0.0, seed: int = 0) -> list[Slopes]:
    """Readings of eight micro-batches in turn that differ by up to half a bit, about a slope and a rise a tick."""
    draw = random.Random(seed)
    own = [draw.uniform(-0.5, 0.5) for _ in range(WINDOW)]
    return [
        Slopes(1.0 + own[k % WINDOW] + rise * k, slope + own[k % WINDOW] - _mean(own) + draw.gauss(0, noise), 2.0, 1.0)
        for k in range(count)
    ]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def test_it_starts_as_pi_at_its_first_setpoint():
    law, pi = AutoSetpoint(PI(setpoint=0.05)), PI(setpoint=0.05)
    seen = [at(0.01, travel=1.0), at(0.03, travel=2.0), at(0.05, travel=3.0)]
    assert law.initial_strength == pi.initial_strength
    for output, expected in zip(run(law, seen)[1], run(pi, seen)[1], strict=True):
        assert output.setpoint == pytest.approx(0.05)
        assert output.reg_strength == pytest.approx(expected.reg_strength)


@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_best_scale_is_that_of_the_parabola(slope, bend):
    assert best_scale(slope - bend, slope - 2 * bend) == pytest.approx(slope / (2 * bend), rel=1e-4)


def test_where_no_finite_scale_is_best_it_says_in_which_direction():
    assert best_scale(1.0, 1.0) == best_scale(1.0, 1.5) == math.inf
    assert best_scale(-1.0, -1.0) == best_scale(0.0, 0.0) == 0.0


def test_what_differs_between_micro_batches_is_no_noise():
    own = [0.3, -0.2, 0.1, 0.4, -0.5, 0.0, 0.2, -0.3]
    values = [value + 0.01 * (-1) ** k for k in range(2) for value in own]
    assert level(values).mean == pytest.approx(_mean(own) - 0.01)
    assert level(values).error == pytest.approx(0.0, abs=1e-12)  # all have changed by the same
    assert level(own).error == pytest.approx(0.1141, abs=1e-4)  # nothing to compare with yet: their scatter counts
    assert rise(values).mean == pytest.approx(-0.02)
    assert rise(own).certainty == 0


def test_the_setpoint_rises_while_held_out_text_wants_more_and_falls_when_it_wants_less():
    law = AutoSetpoint()
    for slope, sign in ((0.2, 1), (-0.2, -1)):
        state, outputs = run(law, [at(0.25, slopes) for slopes in course(slope, noise=0.05)])
        assert math.copysign(1, math.log(state.odds / 0.25)) == sign
        assert outputs[0].setpoint == pytest.approx(START)
        assert outputs[1].setpoint == pytest.approx(START)


def test_it_moves_by_its_rate_where_it_is_sure():
    law = AutoSetpoint(rate=0.1)
    state, _ = run(law, [at(1.0, slopes) for slopes in course(0.2, noise=0.01, count=20)])
    for slopes in course(0.2, noise=0.01, count=23)[20:]:
        before = state
        state, output = law.update(before, at(1.0, slopes))
        assert odds_of(output) == pytest.approx(min(before.odds * math.exp(0.1), math.e))


def test_noise_moves_nothing_much():
    """Slopes about zero: S* wanders by less than a single sure decision in twenty ticks would move it."""
    law = AutoSetpoint()
    ends = [run(law, [at(0.25, s) for s in course(0.0, noise=0.1, count=60, seed=seed)])[0].odds for seed in range(20)]
    assert abs(math.fsum(math.log(odds / 0.25) for odds in ends) / 20) < 0.5


def test_it_falls_from_where_s_is_not_from_where_s_never_came():
    law = AutoSetpoint(PI(setpoint=0.5))
    state, outputs = run(law, [at(0.1, slopes) for slopes in course(-0.3, noise=0.01, count=3)])
    assert odds_of(outputs[-1]) == pytest.approx(0.1 * math.exp(-0.2))
    assert state.odds == pytest.approx(0.1 * math.exp(-0.2))


def test_it_runs_no_further_ahead_of_s_than_s_may_follow():
    law = AutoSetpoint(ahead=2.0)
    up, _ = run(law, [at(0.25, slopes) for slopes in course(0.5, noise=0.01)])
    down, _ = run(law, [at(0.25, slopes) for slopes in course(-0.5, noise=0.01)])
    assert (up.odds, down.odds) == pytest.approx((0.5, 0.125))


def test_it_does_not_fall_while_held_out_text_gains_from_training():
    law = AutoSetpoint()
    seen = [at(0.25, slopes) for slopes in course(-0.2, noise=0.02, rise=0.05)]
    still = [at(0.25, slopes) for slopes in course(-0.2, noise=0.02)]
    assert run(law, seen)[0].odds > 0.25 > run(law, still)[0].odds


def test_before_s_has_been_measured_nothing_moves():
    unborn = replace(at(0.1), s=0.0, param_bpt=0.0)
    seen = [replace(unborn, slopes=slopes) for slopes in course(0.5)]
    assert run(AutoSetpoint(), seen)[0].odds == pytest.approx(0.25)


def test_a_tick_whose_slopes_are_not_finite_is_held():
    law = AutoSetpoint()
    state, before = run(law, [at(0.1, slopes) for slopes in course(0.1, count=5)])
    for place, bad in product(range(4), (math.nan, math.inf)):
        slopes = Slopes(*(bad if i == place else 0.1 * (i + 1) for i in range(4)))
        held, outputs = run(law, [at(0.3, slopes)], state)
        assert held == state
        assert outputs == [replace(before[-1], held=True)]


def test_it_says_what_the_texts_want_and_how_sure_that_is():
    """V = a x - c x^2 with a = 1.1, c = 0.5: the best scale is 1.1."""
    _, outputs = run(AutoSetpoint(), [at(0.25, Slopes(0.6, 0.1, 0.8, 0.6)) for _ in range(4)])
    assert [output.best_scale is None for output in outputs] == [True, True, False, False]
    assert outputs[-1].best_scale == pytest.approx(1.1)
    assert outputs[-1].best_scale_error == pytest.approx(0.0)
    assert outputs[-1].best_scale_training == pytest.approx(2.5)


def test_a_state_comes_back_from_json_as_it_was():
    law = AutoSetpoint()
    state, _ = run(law, [at(0.1, slopes) for slopes in course(0.1, count=20)])
    assert restored(law.init(), asdict(state)) == state
    assert len(state.readings) == 2 * WINDOW


@pytest.mark.parametrize(("steepness", "size"), [(0.2, 0.3), (0.5, 1.0), (1.0, 3.0)])
def test_it_finds_the_size_that_held_out_text_wants(steepness, size):
    """A plant whose best scale falls as a power of the odds, and an S that follows S* at once."""
    law, draw = AutoSetpoint(), random.Random(0)
    state, odds, seen = law.init(), 0.1, []
    for _ in range(200):
        slope = 0.3 * steepness * math.log(size / odds) + draw.gauss(0, 0.02)
        state, output = law.update(state, at(odds, Slopes(1.0, slope, 2.0, 1.0)))
        odds = odds_of(output)
        seen.append(odds)
    assert math.exp(_mean([math.log(value) for value in seen[100:]])) == pytest.approx(size, rel=0.3)
