import math
import random
from dataclasses import asdict, replace
from itertools import pairwise, product
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invariants import run

from granite_scu.control import PI
from granite_scu.control.laws.base import Measurement, Output, as_stored, restored
from research.laws.auto import WINDOW, AutoSetpoint, best_scale, level, rise


def slopes_of(saved: float, slope: float) -> dict[str, float]:
    """As the sensor reads them."""
    return {"savings_held_out": saved, "savings_held_out_slope": slope}


def at(odds: float, slopes: dict[str, float] | None = None, lr_sum: float = 5.0) -> Measurement:
    """S of these odds at a DataBPT of 2."""
    return Measurement(s=odds / (1 + odds), data_bpt=2.0, param_bpt=2.0 * odds, lr_sum=lr_sum, sensed=slopes or {})


def odds_of(output: Output) -> float:
    assert output.setpoint is not None
    return output.setpoint / (1 - output.setpoint)


def course(slope: float, noise: float = 0.01, count: int = 40, rise: float = 0.0, seed: int = 0) -> list[dict]:
    """Readings of eight micro-batches in turn that differ by up to half a bit, about a slope and a rise a tick."""
    draw = random.Random(seed)
    own = [draw.uniform(-0.5, 0.5) for _ in range(WINDOW)]
    own = [value - fmean(own) for value in own]
    return [
        slopes_of(1.0 + own[k % 8] + rise * k + draw.gauss(0, noise), slope + own[k % 8] + draw.gauss(0, noise))
        for k in range(count)
    ]


def test_it_starts_as_pi_at_its_first_setpoint():
    law, pi = AutoSetpoint(PI(setpoint=0.05)), PI(setpoint=0.05)
    seen = [at(0.01, lr_sum=1.0), at(0.03, lr_sum=2.0), at(0.05, lr_sum=3.0)]
    assert law.lambda_start == pi.lambda_start
    for output, expected in zip(run(law, seen)[1], run(pi, seen)[1], strict=True):
        assert output.setpoint == pytest.approx(0.05)
        assert output.lam == pytest.approx(expected.lam)


def test_a_run_that_is_too_short_to_find_a_setpoint_starts_free():
    law = AutoSetpoint(PI(setpoint=0.2, kp=2.0))
    assert law.in_a_run_of(23, 5) == AutoSetpoint(PI(setpoint=0.9, kp=2.0))
    assert law.in_a_run_of(24, 5) == law


@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_best_scale_is_that_of_the_parabola(slope, bend):
    assert best_scale(slope - bend, slope - 2 * bend) == pytest.approx(slope / (2 * bend), rel=1e-4)


def test_where_no_finite_scale_is_best_it_says_in_which_direction():
    assert best_scale(1.0, 1.0) == best_scale(1.0, 1.5) == math.inf
    assert best_scale(-1.0, -1.0) == best_scale(0.0, 0.0) == 0.0


def test_what_differs_between_micro_batches_is_no_noise():
    own = [0.3, -0.2, 0.1, 0.4, -0.5, 0.0, 0.2, -0.3]
    values = [value + 0.01 * (-1) ** k for k in range(2) for value in own]
    assert level(values).mean == pytest.approx(-0.01)
    assert level(values).error == pytest.approx(0.0, abs=1e-12)  # all have changed by the same
    assert level(own).error == pytest.approx(stdev(own) / math.sqrt(8))  # nothing to compare with yet


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0))
def test_the_rise_is_that_at_equal_size(before, now):
    """Along a parabola for each micro-batch, raised by 0.02 a window, whatever the sizes are."""
    sizes = [before] * WINDOW + [now] * WINDOW
    bends = [1 + k % WINDOW / 10 for k in range(2 * WINDOW)]
    values = [2 * x - c * x * x + 0.02 * (k >= WINDOW) for k, (x, c) in enumerate(zip(sizes, bends, strict=True))]
    slopes = [2 * x - 2 * c * x * x for x, c in zip(sizes, bends, strict=True)]
    found = rise(values, slopes, [math.log(x) for x in sizes])
    assert found.mean == pytest.approx(0.02, abs=1e-9)
    assert rise(values[:10], slopes[:10], [0.0] * 10).certainty == 0  # two changes tell nothing


def test_the_setpoint_rises_by_its_rate_while_held_out_text_surely_wants_more():
    """Though it asked for less before."""
    law = AutoSetpoint(rate=0.1)
    turned = replace(law.init(), turned=True)
    _, outputs = run(law, [at(1.0, slopes) for slopes in course(0.2)], turned)
    assert [odds_of(output) for output in outputs[:2]] == pytest.approx([0.25, 0.25])
    risen = [odds_of(output) for output in outputs[16:]]
    assert risen[1] < 1
    assert risen[1:] == pytest.approx([min(odds * math.exp(0.1), math.e) for odds in risen[:-1]])


def test_it_falls_to_the_size_that_held_out_text_wants():
    """V = 1 and V' = -0.2: the best scale is 11/12, and the odds go with its square."""
    law = AutoSetpoint(PI(setpoint=0.5))
    _, outputs = run(law, [at(0.1, slopes) for slopes in course(-0.2, noise=1e-6)])
    assert odds_of(outputs[-1]) == pytest.approx(0.1 * (11 / 12) ** 2, rel=0.01)


def test_it_falls_by_no_more_at_once_than_it_may():
    law = AutoSetpoint(PI(setpoint=0.5), rate=0.05)
    _, outputs = run(law, [at(0.1, slopes) for slopes in course(-2.0)])
    assert odds_of(outputs[-1]) == pytest.approx(0.1 * math.exp(-0.1))


def test_it_runs_no_further_ahead_of_s_than_s_may_follow():
    _, outputs = run(AutoSetpoint(ahead=2.0), [at(0.25, slopes) for slopes in course(0.5)])
    assert odds_of(outputs[-1]) == pytest.approx(0.5)


def test_it_rises_on_while_training_teaches_what_held_out_text_gains_from():
    """Though it would have the adapter smaller: by less than the rise is sure of."""
    law = AutoSetpoint()
    gaining = [at(0.25, slopes) for slopes in course(-0.02, noise=0.05, rise=0.05)]
    still = [at(0.25, slopes) for slopes in course(-0.02, noise=0.05)]
    assert odds_of(run(law, gaining)[1][-1]) > 0.5 > 0.26 > odds_of(run(law, still)[1][-1])


def test_where_training_only_harms_the_adapter_grows_no_further():
    """The size is right, and V falls: S* is not above S."""
    _, outputs = run(AutoSetpoint(PI(setpoint=0.5)), [at(0.1, slopes) for slopes in course(0.0, rise=-0.05)])
    assert 0.1 * math.exp(-0.4) <= odds_of(outputs[-1]) <= 0.1 * (1 + 1e-9)


def test_within_doubt_the_setpoint_stays():
    law = AutoSetpoint(doubt=1e6)
    turned = replace(law.init(), turned=True)
    assert run(law, [at(0.25, slopes) for slopes in course(0.3)], turned)[0].odds == pytest.approx(0.25)


def test_noise_alone_seldom_moves_the_setpoint():
    """A size that is right, and no rise, from the 16th reading on: of 4,000 ticks it rises at 4 per cent."""
    law, risen, fallen, ticks = AutoSetpoint(ahead=1e9), 0, 0, 0
    for seed in range(100):
        turned = replace(law.init(), turned=True)
        seen = [at(0.25, slopes) for slopes in course(0.0, noise=0.05, count=56, seed=seed)]
        odds = [odds_of(output) for output in run(law, seen, turned)[1]][2 * WINDOW - 1 :]
        ticks += len(odds) - 1
        risen += sum(after > before for before, after in pairwise(odds))
        fallen += sum(after < before for before, after in pairwise(odds))
    assert ticks == 4000
    assert 0 < risen < 0.08 * ticks
    assert fallen < 0.08 * ticks


def test_until_held_out_text_has_asked_for_less_doubt_lets_the_setpoint_rise():
    """It asks for less from the 24th reading on, and for more again from the 32nd."""
    law = AutoSetpoint(doubt=50.0, ahead=1e6)
    asked = [*course(0.0, count=24), *course(-2.0, noise=1e-3, count=8), *course(0.0, count=24)]
    state, outputs = run(law, [at(0.25, slopes) for slopes in asked])
    odds = [odds_of(output) for output in outputs]
    assert all(after == pytest.approx(before * math.exp(law.first_rate)) for before, after in pairwise(odds[1:24]))
    assert state.turned
    assert min(odds[24:32]) < 0.25
    assert odds[-1] <= odds[32]


def test_before_s_has_been_measured_nothing_moves():
    unborn = replace(at(0.1), s=0.0, param_bpt=0.0)
    seen = [replace(unborn, sensed=slopes) for slopes in course(0.5)]
    assert run(AutoSetpoint(), seen)[0].odds == pytest.approx(0.25)


def test_a_tick_whose_held_out_figures_are_not_finite_is_held():
    law = AutoSetpoint()
    state, before = run(law, [at(0.1, slopes) for slopes in course(0.1, count=5)])
    for place, bad in product(range(2), (math.nan, math.inf)):
        slopes = slopes_of(*(bad if i == place else 0.1 * (i + 1) for i in range(2)))
        held, outputs = run(law, [at(0.3, slopes)], state)
        assert held == state
        assert outputs == [replace(before[-1], held=True)]


def test_a_state_comes_back_from_json_as_it_was():
    """Also from a checkpoint of an earlier version, which had other names for lambda."""
    law = AutoSetpoint()
    state, _ = run(law, [at(0.1, slopes) for slopes in course(0.1, count=20)])
    stored = as_stored(asdict(state))
    assert restored(law.init(), stored) == state
    assert stored["law"]["travel"] == 5.0
    assert len(state.readings) == 2 * WINDOW


@pytest.mark.parametrize(("size", "noise"), product([0.3, 1.0, 3.0], [0.01, 0.3]))
def test_it_finds_the_size_that_held_out_text_wants(size, noise):
    """A plant with one best size that an adapter outgrows unless it is held, and an S that follows S* at once."""
    law, draw = AutoSetpoint(), random.Random(0)
    state, odds, seen = law.init(), 0.1, []
    for _ in range(200):
        x = math.sqrt(odds / size)  # its size over the best one
        slopes = slopes_of(2 * x - x * x + draw.gauss(0, noise), 2 * x - 2 * x * x + draw.gauss(0, noise))
        state, output = law.update(state, at(odds, slopes))
        odds = min(odds_of(output), 1.3 * odds)
        seen.append(odds)
    assert math.exp(fmean(math.log(value) for value in seen[100:])) == pytest.approx(size, rel=0.25)
