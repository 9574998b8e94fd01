import math
from dataclasses import replace

import pytest
from invariants import ERRORS, run, seen

from research.laws.i import Integral


def test_a_course_worked_out_by_hand():
    law = Integral(setpoint=0.1, ki=0.5, ema_alpha=1.0, error_limit=2.0, lambda_init=1.0)
    _, outputs = run(law, [seen(0.1 * math.exp(error)) for error in (1.0, 0.0, -2.0, -4.0)])
    assert [output.i_term for output in outputs] == pytest.approx([0.5, 0.5, -0.5, -1.5])
    assert [output.lam for output in outputs] == pytest.approx([math.exp(x) for x in (0.5, 0.5, -0.5, -1.5)])
    assert outputs[0].p_term is None


def test_it_moves_by_no_more_than_its_limit_and_holds_where_there_is_no_error():
    law = Integral(setpoint=0.1, ki=1.0, ema_alpha=1.0, lambda_init=1.0)
    _, (first, large, infinite, undefined, last) = run(law, [seen(0.1 * math.exp(error)) for error in ERRORS])
    assert first.lam == pytest.approx(1.0)
    assert large.lam == pytest.approx(math.exp(0.75))
    assert infinite == undefined == replace(large, held=True)
    assert last.lam == pytest.approx(large.lam)


def test_long_saturation_does_not_wind_up():
    law = Integral(setpoint=0.1, ema_alpha=1.0, lambda_max=2.0)
    _, outputs = run(law, [seen(0.9)] * 500 + [seen(0.05)])
    assert outputs[-2].saturated and outputs[-2].lam == 2.0
    assert not outputs[-1].saturated and outputs[-1].lam < 2.0


def test_a_small_error_is_not_integrated():
    law = Integral(setpoint=0.1, ema_alpha=1.0, deadband=0.05)
    _, (small, large) = run(law, [seen(0.1 * math.exp(error)) for error in (0.04, 0.06)])
    assert small.in_deadband and small.lam == pytest.approx(0.5)
    assert not large.in_deadband and large.lam > 0.5
