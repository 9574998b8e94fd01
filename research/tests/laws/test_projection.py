import math
from dataclasses import replace

import pytest
from invariants import ERRORS, UNUSABLE, run, seen

from research.laws.projection import Projection


def test_bounds_worked_out_by_hand():
    """A quarter of the bits: a third of the data's. The filter takes 2 and then 2/3 of 5 with 1/3 of 2."""
    _, outputs = run(Projection(setpoint=0.25), [seen(0.1, data_bpt=3.0), seen(0.1, data_bpt=6.0)])
    assert [output.param_bound for output in outputs] == pytest.approx([1.0, 5 / 3])
    assert {output.lam for output in outputs} == {0.0}


def test_s_is_at_its_setpoint_where_the_bound_is_met():
    _, (output,) = run(Projection(setpoint=0.07), [seen(0.5, data_bpt=4.2)])
    assert output.param_bound / (4.2 + output.param_bound) == pytest.approx(0.07)


def test_errors_and_holds():
    law = Projection(setpoint=0.02, ema_alpha=1.0)
    _, (first, large, infinite, undefined, last) = run(law, [seen(0.02 * math.exp(error)) for error in ERRORS])
    assert first.error == pytest.approx(0.0) and large.error == pytest.approx(3.0)
    assert infinite == undefined == replace(large, held=True)
    assert last == first


@pytest.mark.parametrize("bad", [0.0, *UNUSABLE])
def test_bits_that_cannot_be_used_hold_and_bind_nothing_at_the_start(bad):
    law = Projection(setpoint=0.02)
    start, (output,) = run(law, [seen(0.02, data_bpt=bad)])
    assert start == law.init()
    assert output.held and output.param_bound is None
    state, (before,) = run(law, [seen(0.02)])
    assert run(law, [seen(0.02, data_bpt=bad)], state) == (state, [replace(before, held=True)])
