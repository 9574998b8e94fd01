import math
from dataclasses import replace

import pytest
from invariants import ERRORS, run, seen

from research.laws.original import Original


def test_its_defaults_are_the_published_ones():
    assert Original() == Original(
        setpoint=0.01,
        kp=0.8,
        ki=0.15,
        ema_alpha=0.1,
        deadband=0.002,
        integral_limit=0.2,
        leak=0.995,
        lambda_init=1.0,
        lambda_min=1e-4,
        lambda_max=2.0,
    )


def test_two_ticks_worked_out_by_hand():
    """The first S is taken whole, then 0.9 of it and 0.1 of the next; I leaks before it grows, and acts at once."""
    state, outputs = run(Original(), [seen(0.11), seen(0.21)])
    assert [output.smoothed for output in outputs] == pytest.approx([0.11, 0.12])
    first, second = 0.15 * 0.1, 0.995 * 0.15 * 0.1 + 0.15 * 0.11
    assert [output.i_term for output in outputs] == pytest.approx([first, second])
    assert [output.p_term for output in outputs] == pytest.approx([0.08, 0.088])
    assert outputs[0].lam == pytest.approx(math.exp(0.08 + first))
    assert outputs[1].lam == pytest.approx(math.exp(0.08 + first + 0.088 + second))
    assert state.integral == outputs[1].i_term


def test_inside_the_deadband_lambda_stays_and_the_integral_leaks():
    law = Original(ema_alpha=1.0)
    state, outputs = run(law, [seen(0.11), seen(0.0119), seen(0.0081)])
    assert [output.in_deadband for output in outputs] == [False, True, True]
    assert outputs[2].lam == outputs[0].lam
    assert state.integral == pytest.approx(0.995**2 * 0.015)


def test_the_integral_is_clipped():
    state, (output,) = run(Original(ema_alpha=1.0, ki=5.0, lambda_max=10.0), [seen(0.9)])
    assert state.integral == 0.2
    assert output.lam == pytest.approx(math.exp(0.8 * 0.89 + 0.2))


def test_the_integral_is_not_fed_while_lambda_rests_on_a_bound():
    state, outputs = run(Original(ema_alpha=1.0, ki=5.0), [seen(0.9)] * 3)
    assert [output.lam for output in outputs] == [2.0] * 3
    assert outputs[-1].saturated
    assert state.integral == pytest.approx(0.2 * 0.995**2)  # it leaks all the same
    assert run(Original(ema_alpha=1.0, ki=0.1), [seen(0.001)], state)[0].integral < state.integral * 0.995


def test_errors_and_holds():
    law = Original(ema_alpha=1.0)
    s = [0.01 * math.exp(error) for error in ERRORS]
    _, (first, large, infinite, undefined, last) = run(law, [seen(each) for each in s])
    assert first.in_deadband and first.lam == 1.0
    assert large.error == pytest.approx(3.0)
    assert infinite == undefined == replace(large, held=True)
    assert last.in_deadband and last.lam == large.lam


def test_an_s_of_zero_is_a_measurement_and_has_no_logarithm():
    _, (output,) = run(Original(), [seen(0.0)])
    assert not output.held
    assert output.smoothed is output.error is None
    assert output.lam < 1.0
