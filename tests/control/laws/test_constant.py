import math

import pytest

from granite_scu.control import Fixed, Measurement, NoControl


def seen(s: float) -> Measurement:
    return Measurement(s=s, data_bpt=2.0, param_bpt=0.1)


@pytest.mark.parametrize(("controller", "strength"), [(Fixed(lambda_init=0.3), 0.3), (NoControl(), 0.0)])
def test_lambda_never_moves(controller, strength):
    state = controller.init()
    assert controller.initial_strength == strength
    for s in (0.0, 1e-9, 0.5, math.nan, math.inf, 0.999):
        state, output = controller.update(state, seen(s))
        assert output.reg_strength == strength
        assert not output.saturated


def test_the_error_is_reported_against_a_setpoint():
    controller = NoControl(setpoint=0.02)
    _, output = controller.update(controller.init(), seen(0.01))
    assert output.error == pytest.approx(-math.log(2))
