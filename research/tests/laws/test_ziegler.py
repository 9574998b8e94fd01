import pytest
from invariants import run

from granite_scu.control import Measurement
from research.laws.ziegler import Ziegler


def test_a_course_worked_out_by_hand():
    """Of drift at a budget of 2 %: in bits per token, 3 of which the base needs."""
    budget, base = 0.02, 3.0
    law = Ziegler(setpoint=budget / (1 + budget), lambda_init=1.0, lambda_max=1.02)
    drifts = [base * budget * times for times in (1.1, 5.0, 1.0, 0.9, 0.0001)]
    _, outputs = run(law, [Measurement(s=f / (f + base), data_bpt=base, param_bpt=f) for f in drifts])
    changes = [output.p_term for output in outputs]
    assert changes == pytest.approx([0.01, 0.02, 0.0, -0.01, -0.02], abs=1e-12)
    assert [output.lam for output in outputs] == pytest.approx([1.01, 1.02, 1.02, 1.0098, 1.0098 * 0.98])
    assert [output.saturated for output in outputs] == [False, True, True, False, False]
