"""The setpoint that a probe proposes."""

import math
from dataclasses import replace
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.control.diagnostics.setpoint import (
    FRACTION,
    LEAST,
    MOST,
    Free,
    Point,
    extrapolate,
    probe_steps,
    propose_setpoint,
    turn,
)


def grown(exponent=2.0, ticks=20, last=0.1, data_bpt=5.0, param_at_last=1.0) -> list[Point]:
    moved = [last * (k + 1) / ticks for k in range(ticks)]
    return [Point(3 * k, m, param_at_last * (m / last) ** exponent, data_bpt) for k, m in enumerate(moved, 1)]


@pytest.mark.parametrize("exponent", [1.0, 1.7, 2.0, 2.3])
def test_a_power_law_is_continued_exactly(exponent):
    free = extrapolate(grown(exponent), moved_at_end=0.4)
    param_bpt = 4**exponent
    assert free.exponent == pytest.approx(exponent)
    assert free.s == pytest.approx(param_bpt / (param_bpt + 5))
    assert free.low < free.s < free.high


def test_what_a_run_measured_at_its_end_lies_in_the_interval_of_its_first_part():
    """ParamBPT of the embedded model without lambda (rate 1e-3, N = 49 152), the sum of rates before it."""
    early = [(0.0009, 0.0026), (0.0033, 0.0227), (0.0070, 0.096), (0.0110, 0.2319), (0.0149, 0.4082), (0.0188, 0.6067)]
    points = [Point(4 * k, moved, param_bpt, 5.6) for k, (moved, param_bpt) in enumerate(early, 1)]
    free = extrapolate(points, moved_at_end=0.0505)
    assert free.low < 4.6588 / (4.6588 + 5.11) < free.high


def odds(s: float) -> float:
    return s / (1 - s)


def test_data_that_falls_raises_the_upper_end_alone():
    """But for its spread over the quarter of the probe that it is averaged over, which widens both."""
    points = grown()
    falling = [replace(p, data_bpt=5.0 * (points[-1].moved / p.moved) ** 0.3) for p in points]
    steady, free = extrapolate(points, moved_at_end=0.4), extrapolate(falling, moved_at_end=0.4)
    last = [p.data_bpt for p in falling[-5:]]
    level, spread = 5.0 * 5 / sum(last), math.exp(2 * stdev(map(math.log, last)) / math.sqrt(5))
    assert odds(free.s) == pytest.approx(odds(steady.s) * level)
    assert odds(free.low) == pytest.approx(odds(steady.low) * level / spread)
    assert odds(free.high) == pytest.approx(odds(steady.high) * level * spread * 4 ** (2 * 0.3))


def test_a_probe_as_long_as_the_run_is_as_uncertain_as_its_data():
    points = [replace(p, data_bpt=5.0 + 0.1 * (-1) ** k) for k, p in enumerate(grown())]
    free = extrapolate(points, moved_at_end=points[-1].moved)
    assert free.low < free.s < free.high
    assert odds(free.high) / odds(free.low) == pytest.approx(math.exp(4 * 0.022 / math.sqrt(5)), rel=0.01)


@pytest.mark.parametrize(
    "spoilt", [{"data_bpt": 0.0}, {"data_bpt": math.inf}, {"param_bpt": math.nan}, {"param_bpt": 0.0}]
)
def test_a_tick_that_says_nothing_is_left_out(spoilt):
    points = grown()
    assert extrapolate([*points[:-1], replace(points[-1], **spoilt)], 0.4).s == pytest.approx(
        extrapolate(points[:-1], 0.4).s
    )


def test_too_little_to_go_by():
    with pytest.raises(ValueError, match="fewer than four"):
        extrapolate(grown()[:3], 0.4)


@pytest.mark.parametrize(
    ("validations", "step"),
    [
        ([], None),
        ([(10, 5.0), (20, 4.9)], None),
        ([(10, 5.0), (20, 4.9), (30, 4.905)], None),  # within what counts as flat
        ([(10, 4.9), (20, 4.8), (30, 5.1)], 20),
    ],
)
def test_a_turn_is_a_rise_after_the_least(validations, step):
    assert turn(validations) == step


def test_the_words_say_why():
    proposal = propose_setpoint(Free(0.78, 0.7, 0.85, 2.0), steps=400)
    assert proposal.target_s == 0.54
    for words in ("S_free about 78.00%", "after 400 steps", "S* = 54.00%"):
        assert words in proposal.reason


def test_a_turn_of_the_validation_loss_lowers_it():
    free = Free(0.78, 0.7, 0.85, 2.0)
    proposal = propose_setpoint(free, 400, s_at_turn=0.1)
    assert proposal.target_s == 0.1
    assert "turned where S was 10.00%" in proposal.reason
    assert "S* = 10.00%, S where validation turned, so that" in proposal.reason
    assert propose_setpoint(free, 400, s_at_turn=0.6).target_s == 0.54


@pytest.mark.parametrize(
    ("free", "at_turn", "words"),
    [
        (Free(0.5, 0.4, 0.6, 2.0), None, "S* = 35.00%, 70% of S_free, so that"),
        (Free(0.5, 0.4, 0.6, 2.0), 0.4, "S* = 35.00%, 70% of S_free, so that"),
        (Free(0.5, 0.1, 0.9, 2.0), None, "S* = 35.00%, 70% of S_free, so that"),
        (Free(0.5, 0.4, 0.6, 2.0), 0.1, "S* = 10.00%, S where validation turned, so that"),
        (Free(0.005, 0.004, 0.006, 2.0), None, "S* = 0.50%, the least that is proposed (70% of S_free would be 0.35%,"),
        (Free(0.5, 0.4, 0.6, 2.0), 0.001, "the least that is proposed (S where validation turned would be 0.10%,"),
    ],
)
def test_the_words_name_what_bound_it(free, at_turn, words):
    assert words in propose_setpoint(free, 400, at_turn).reason


def test_where_little_can_be_reached_it_says_so():
    proposal = propose_setpoint(Free(0.004, 0.003, 0.0045, 2.0), 100)
    assert proposal.target_s == LEAST
    assert "will not get there" in proposal.reason
    assert "S may fall short of it" in propose_setpoint(Free(0.004, 0.003, 0.006, 2.0), 100).reason
    within = propose_setpoint(Free(0.02, 0.015, 0.04, 2.0), 100).reason
    assert "not get there" not in within and "fall short" not in within


@given(st.floats(1e-6, 0.999), st.floats(0, 1), st.one_of(st.none(), st.floats(1e-6, 0.99)))
def test_it_is_always_a_ratio_within_the_limits_and_below_what_is_free(s, share, at_turn):
    proposal = propose_setpoint(Free(s, s * share, s, 2.0), 100, at_turn)
    assert LEAST <= proposal.target_s <= MOST
    assert proposal.target_s <= max(LEAST, FRACTION * s) * (1 + 1e-6)


@given(st.integers(1, 10**6))
def test_a_probe_is_a_small_part_of_a_long_run_and_never_longer_than_a_short_one(steps):
    assert 1 <= probe_steps(steps) <= steps
    assert probe_steps(steps) <= max(60, steps / 10 + 1)
