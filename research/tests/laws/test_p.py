import math
from dataclasses import replace

import pytest
from invariants import ERRORS, run, seen

from research.laws.p import Proportional


def test_a_course_worked_out_by_hand():
    law = Proportional(setpoint=0.1, kp=2.0, ema_alpha=1.0, lambda_init=0.5)
    _, outputs = run(law, [seen(0.1 * math.exp(error)) for error in (0.0, 0.5, -1.0)])
    assert [output.lam for output in outputs] == pytest.approx([0.5, 0.5 * math.e, 0.5 * math.exp(-2)])
    assert [output.p_term for output in outputs] == pytest.approx([0.0, 1.0, -2.0])
    assert outputs[0].i_term is None


def test_it_holds_where_there_is_no_error_and_forgets_that_there_was_none():
    law = Proportional(setpoint=0.1, kp=1.0, ema_alpha=1.0, lambda_init=0.5)
    _, outputs = run(law, [seen(0.1 * math.exp(error)) for error in ERRORS])
    first, large, infinite, undefined, last = outputs
    assert large.lam == pytest.approx(0.5 * math.exp(3))
    assert infinite == undefined == replace(large, held=True)
    assert last == first


def test_it_saturates_and_comes_back_at_once():
    law = Proportional(setpoint=0.1, ema_alpha=1.0, lambda_max=2.0)
    _, outputs = run(law, [seen(0.9)] * 50 + [seen(0.1)])
    assert outputs[-2].saturated and outputs[-2].lam == 2.0
    assert not outputs[-1].saturated and outputs[-1].lam == pytest.approx(0.5)
