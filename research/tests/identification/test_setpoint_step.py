import math
from dataclasses import asdict

import pytest
from invariants import run, seen

from granite_scu.control import PI
from granite_scu.control.laws.base import restored
from research.identification.setpoint_step import SetpointStep


def test_the_setpoint_steps_at_its_tick():
    law = PI(setpoint=0.02, lambda_init=1.0, ema_alpha=1.0)
    _, outputs = run(SetpointStep(law, at=3, factor=2.0), [seen(0.02)] * 6)
    assert [output.setpoint for output in outputs] == [0.02] * 3 + [0.04] * 3
    assert [output.error for output in outputs] == pytest.approx([0.0] * 3 + [-math.log(2)] * 3)


def test_its_state_survives_a_checkpoint():
    controller = SetpointStep(PI(setpoint=0.02), 3)
    state, _ = run(controller, [seen(s) for s in (0.01, 0.02, 0.03, 0.02, 0.02)])
    assert restored(controller.init(), asdict(state)) == state


def test_a_step_to_what_is_no_ratio_is_refused():
    with pytest.raises(ValueError, match="S\\* is a ratio"):
        SetpointStep(PI(setpoint=0.02), at=3, factor=60.0)
