import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invariants import run, seen

from granite_scu.control import PI
from granite_scu.control.laws.base import Measurement, Output
from research.laws.cascade import PROBED_SCALE, AdapterBenefit, Cascade, best_log_scale, headroom


def at(odds: float, saved: AdapterBenefit | None = None, lr_sum: float = 5.0) -> Measurement:
    """S of these odds at a DataBPT of 2."""
    sensed = sensed_of(saved) if saved else {}
    return Measurement(s=odds / (1 + odds), data_bpt=2.0, param_bpt=2.0 * odds, lr_sum=lr_sum, sensed=sensed)


def sensed_of(saved: AdapterBenefit) -> dict[str, float]:
    return {f"saved_{name}": value for name, value in saved._asdict().items()}


def odds_of(output: Output) -> float:
    assert output.setpoint is not None
    return output.setpoint / (1 - output.setpoint)


def test_it_starts_as_pi_at_a_small_setpoint():
    law, pi = Cascade(start=0.05), PI(setpoint=0.05)
    course = [at(0.01, lr_sum=1.0), at(0.03, lr_sum=2.0), at(0.05, lr_sum=3.0)]
    assert law.lambda_start == pytest.approx(pi.lambda_start)
    for output, expected in zip(run(law, course)[1], run(pi, course)[1], strict=True):
        assert output.setpoint == pytest.approx(0.05)
        assert output.lam == pytest.approx(expected.lam)


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


def saved_with(held_out: float, training: float = 1.0) -> AdapterBenefit:
    """Savings whose best scales are these."""
    return AdapterBenefit(*on_parabola(2 * held_out, 1.0), *on_parabola(2 * training, 1.0))


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 0.9))
def test_the_adapter_may_grow_while_held_out_text_asks_for_it_or_what_is_learned_carries_over(held_out, training, aim):
    expected = max(math.log(held_out), math.log(held_out / training / aim))
    assert headroom(saved_with(held_out, training), aim) == pytest.approx(expected, abs=1e-6)


ENDLESS, HARMFUL = on_parabola(1.0, -0.5), on_parabola(-1.0, 0.5)
FINITE = on_parabola(1.0, 1.0)


@pytest.mark.parametrize(
    ("held_out", "training", "expected"),
    [
        (ENDLESS, ENDLESS, math.inf),
        (HARMFUL, HARMFUL, -math.inf),
        (ENDLESS, FINITE, math.inf),
        (HARMFUL, FINITE, -math.inf),
        (FINITE, ENDLESS, math.log(0.5)),
        (FINITE, HARMFUL, math.log(0.5)),
    ],
)
def test_where_no_finite_scale_is_best(held_out, training, expected):
    assert headroom(AdapterBenefit(*held_out, *training), 0.5) == pytest.approx(expected)


def test_the_setpoint_follows_the_headroom():
    law = Cascade(aim=0.5, gain=2.0, limit=9.0, start=0.2)
    state, _ = run(law, [at(0.2)])
    for held_out, training, factor in ((0.8, 1.0, 1.6), (1.5, 6.0, 1.5), (0.3, 1.5, 0.4), (0.7, 2.0, 0.7)):
        _, (output,) = run(law, [at(0.2, saved_with(held_out, training))], state)
        assert odds_of(output) == pytest.approx(state.odds * factor**2)


def test_an_adapter_that_is_still_zero_moves_nothing():
    law = Cascade()
    state, _ = run(law, [at(0.1)])
    assert run(law, [at(0.1, AdapterBenefit(0.0, 0.0, 0.0, 0.0))], state)[0].odds == state.odds


def test_before_s_has_been_measured_nothing_moves():
    law = Cascade()
    assert run(law, [replace(seen(0.0), sensed=sensed_of(saved_with(2.0)))])[0].odds == law.init().odds


def test_it_moves_by_no_more_than_the_limit():
    law = Cascade(gain=1.0, limit=0.5, start=0.02)
    state, _ = run(law, [at(state_odds := 0.02 / 0.98)])
    for held_out, change in ((5.0, 0.5), (0.05, -0.5)):
        _, (output,) = run(law, [at(state_odds, saved_with(held_out))], state)
        assert odds_of(output) == pytest.approx(state_odds * math.exp(change))


def test_the_setpoint_does_not_run_away_from_an_s_that_cannot_follow():
    law = Cascade(start=0.1, limit=1.0)
    state, _ = run(law, [at(0.05), *[at(0.05, saved_with(1.0))] * 30])
    assert state.odds == pytest.approx(0.05 * math.e)


def test_the_setpoint_falls_no_lower_than_from_where_it_can_return():
    """Text that harms in every size, as held-out text of another kind does before a shift."""
    law = Cascade()
    state, _ = run(law, [at(0.05), *[at(0.05, AdapterBenefit(*HARMFUL, *FINITE))] * 30])
    assert state.odds == 0.01
    odds = state.odds
    for _ in range(8):  # and S follows
        state, output = law.update(state, at(odds, saved_with(0.9)))
        odds = odds_of(output)
    assert odds > 0.1


@pytest.mark.parametrize(("steepness", "size"), [(0.2, 0.3), (0.45, 1.0), (0.8, 3.0)])
def test_it_finds_the_size_at_which_neither_asks_for_more(steepness, size):
    """A plant in which what carries over falls as a power of the odds, and an S that follows S* at once."""
    law = Cascade()
    state, odds = law.init(), 0.1
    for _ in range(80):
        share = min(1.0, law.aim * (size / odds) ** steepness)
        state, output = law.update(state, at(odds, saved_with(share)))
        odds = odds_of(output)
    assert odds == pytest.approx(size, rel=0.02)


def test_a_tick_whose_savings_are_not_finite_is_held():
    law = Cascade()
    state, before = run(law, [at(0.1)])
    for place, bad in product(range(4), (math.nan, math.inf)):
        saved = AdapterBenefit(*(bad if i == place else 0.1 * (i + 1) for i in range(4)))
        held, outputs = run(law, [at(0.3, saved)], state)
        assert held == state
        assert outputs == [replace(before[-1], held=True)]
