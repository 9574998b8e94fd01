"""What holds for every controller, whatever is measured. What each computes is in a file of its own."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import LAWS, MEASUREMENTS, UNUSABLE, check_held, check_invariants, run, seen

from granite_scu.control import CONTROLLERS, build


def test_every_law_is_tried():
    assert LAWS.keys() == CONTROLLERS.keys()


@pytest.mark.parametrize("name", LAWS)
@settings(max_examples=40)
@given(st.data(), MEASUREMENTS)
def test_invariants(name, data, measurements):
    check_invariants(data.draw(LAWS[name]), measurements)


@pytest.mark.parametrize("bad", UNUSABLE)
@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_tick_whose_s_is_no_measurement_is_held(name, bad):
    check_held(build(name, target_s=0.02), bad)


@pytest.mark.parametrize("name", ["none", "fixed", "linear", "cosine"])
def test_s_changes_nothing_about_an_open_loop_but_what_is_logged(name):
    law = build(name, target_s=0.02)
    _, outputs = run(law, [seen(0.02 * math.exp(error), progress=0.5, step=5) for error in (0.0, 3.0, math.inf, 0.0)])
    assert len({output.lam for output in outputs}) == 1
    assert [output.held for output in outputs] == [False, False, True, False]
    assert outputs[0].error == pytest.approx(0.0) and outputs[2].smoothed == outputs[1].smoothed
