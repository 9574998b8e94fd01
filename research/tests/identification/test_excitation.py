import math
from dataclasses import asdict

import numpy as np
import pytest
from invariants import run, seen

from granite_scu.control import PI, build
from granite_scu.control.laws.base import restored
from granite_scu.training.preflight import beyond_the_bounds
from research.identification.excitation import Excitation

LAW = PI(setpoint=0.02)


def test_the_excitation_settles_and_then_steps_around_where_it_settled():
    law = PI(setpoint=0.02, lambda_init=1.0)
    controller = Excitation(law, settle=10, amplitude=0.5, dwell=3, seed=1)
    values = [0.02 * math.exp(0.3 * math.sin(k)) for k in range(40)]
    state, outputs = run(controller, [seen(s) for s in values])
    _, alone = run(law, [seen(s) for s in values])
    assert outputs[:10] == alone[:10]
    level = np.mean([math.log(output.lam) for output in alone[5:10]])
    assert state.level == pytest.approx(level)
    steps = [math.log(output.lam) - level for output in outputs[10:]]
    assert np.abs(steps) == pytest.approx(np.full(30, 0.5))
    assert [math.copysign(1, value) for value in steps[::3]] == list(controller.signs(10))
    assert sum(controller.signs(10)) == 0


def test_the_excitation_steps_on_where_nothing_is_measured_and_stays_inside_the_bounds():
    controller = Excitation(PI(setpoint=0.02, lambda_min=0.1, lambda_max=0.6), settle=4, amplitude=1000.0, dwell=1)
    _, outputs = run(controller, [seen(s) for s in [0.02] * 6 + [math.nan] * 6])
    assert {output.held for output in outputs[6:]} == {True}
    wanted = [0.6 if sign > 0 else 0.1 for sign in controller.signs(8)]
    assert [output.lam for output in outputs[4:]] == pytest.approx(wanted)
    assert all(output.saturated for output in outputs[4:])


def test_its_state_survives_a_checkpoint():
    controller = Excitation(LAW, 4, 0.5, 2)
    state, _ = run(controller, [seen(s) for s in (0.01, 0.02, 0.03, 0.02, 0.02)])
    assert restored(controller.init(), asdict(state)) == state


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"settle": 1}, "settle 1"), ({"amplitude": 0.0}, "amplitude 0"), ({"dwell": 0}, "dwell 0")],
)
def test_settings_out_of_range_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        Excitation(LAW, **{"settle": 5, "amplitude": 0.5, "dwell": 1, **changed})


def test_a_bound_is_warned_of_where_a_test_steps_around_the_law():
    law = build("pi", target_s=0.004, lambda_max=0.1)
    assert beyond_the_bounds(Excitation(law, settle=40, amplitude=1.0, dwell=5)) == beyond_the_bounds(law) is not None
