"""What holds for every controller, whatever is measured. What each computes is in a file of its own."""

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import LAWS, MEASUREMENTS, UNUSABLE, run, seen

from granite_scu.control import CONTROLLERS, build
from granite_scu.control.laws.base import restored


def test_every_law_is_tried():
    assert LAWS.keys() == {*CONTROLLERS, "auto"}


@pytest.mark.parametrize("name", LAWS)
@settings(max_examples=40)
@given(st.data(), MEASUREMENTS)
def test_invariants(name, data, measurements):
    """Lambda within its bounds, nothing that JSON cannot say, equal results for equal arguments, and a state that goes
    through JSON unchanged."""
    law = data.draw(LAWS[name])
    bounded = getattr(law, "law", law)  # what a wrapper is around
    low, high = getattr(bounded, "lambda_min", 0.0), getattr(bounded, "lambda_max", 1e3)
    state, outputs = run(law, measurements)
    for output in outputs:
        json.dumps(asdict(output), allow_nan=False)
        assert all(low <= strength <= high for strength in (output.reg_strength, *(output.layers or ())))
        assert output.param_bound is None or output.param_bound >= 0  # of the smallest number there is, a half is zero
    assert run(law, measurements) == (state, outputs)
    again = restored(law.init(), json.loads(json.dumps(asdict(state), allow_nan=False)))
    assert again == state
    assert run(law, measurements, again) == run(law, measurements, state)


OF_A_LAW = {"replay": {"steps": (1,), "strengths": (0.1,)}}


@pytest.mark.parametrize("bad", UNUSABLE)
@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_tick_whose_s_is_no_measurement_is_held(name, bad):
    law = build(name, target_s=0.02, **OF_A_LAW.get(name, {}))
    assert law.update(law.init(), seen(bad))[1].reg_strength == law.initial_strength
    state, (_, before) = run(law, [seen(0.01), seen(0.03)])
    held_state, (held,) = run(law, [seen(bad)], state)
    assert held_state == state
    assert held == replace(before, held=True)


@pytest.mark.parametrize("name", ["none", "fixed", "linear", "cosine", "replay"])
def test_s_changes_nothing_about_an_open_loop_but_what_is_logged(name):
    law = build(name, target_s=0.02, **OF_A_LAW.get(name, {}))
    _, outputs = run(law, [seen(0.02 * math.exp(error), progress=0.5, step=5) for error in (0.0, 3.0, math.inf, 0.0)])
    assert len({output.reg_strength for output in outputs}) == 1
    assert [output.held for output in outputs] == [False, False, True, False]
    assert outputs[0].error == pytest.approx(0.0) and outputs[2].smoothed == outputs[1].smoothed
