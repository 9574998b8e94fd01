import math
from dataclasses import replace

import pytest
from invariants import UNUSABLE, run, seen

from research.laws.cpr import CPR


def of(*costs: float, s: float = 0.02):
    return seen(s, layers=costs)


def test_multipliers_worked_out_by_hand():
    """A matrix at twice its bound, and one at half of it: only the first is pulled, and less when it has shrunk."""
    law = CPR(cpr_bound=0.1, mu=0.4)
    _, outputs = run(law, [of(0.2, 0.05), of(0.1, 0.05), of(0.05, 0.3)])
    assert [output.layers for output in outputs] == [
        pytest.approx((0.4, 0.0)),
        pytest.approx((0.4, 0.0)),
        pytest.approx((0.2, 0.8)),
    ]
    assert [output.lam for output in outputs] == pytest.approx([0.2, 0.2, 0.5])


def test_bounds_not_given_are_what_each_matrix_costs_after_the_warm_up():
    law = CPR(cpr_warmup=3, mu=1.0)
    state, outputs = run(law, [of(0.1, 1.0), of(0.2, 2.0), of(0.3, 3.0), of(0.6, 3.0)])
    assert state.bounds == (0.3, 3.0)
    assert [output.layers for output in outputs[:3]] == [(0.0, 0.0)] * 3
    assert outputs[3].layers == pytest.approx((1.0, 0.0))


def test_a_matrix_that_has_learned_nothing_is_bound_once_it_has():
    law = CPR(cpr_warmup=1, mu=1.0)
    state, outputs = run(law, [of(0.1, 0.0), of(0.1, 0.2), of(0.1, 0.4)])
    assert state.bounds == (0.1, 0.2)
    assert outputs[-1].layers == pytest.approx((0.0, 1.0))


@pytest.mark.parametrize("nothing", [0.0, 1e-12])
def test_the_first_crumb_that_a_matrix_learns_is_no_bound(nothing):
    """Such a bound would have driven lambda to its limit a tick later."""
    law = CPR(cpr_warmup=2, mu=1.0)
    state, outputs = run(law, [of(0.1, nothing), of(0.1, nothing), of(0.1, 1e-12), of(0.1, 1e-4), of(0.1, 0.05)])
    assert [output.layers for output in outputs] == [(0.0, 0.0)] * 5
    assert state.bounds == (0.1, 0.05)
    assert run(law, [of(0.1, 0.1)], state)[1][0].layers == pytest.approx((0.0, 1.0))


def test_no_lambda_exceeds_its_bound():
    _, outputs = run(CPR(cpr_bound=1e-6, lambda_max=3.0), [of(1.0, 1e-7)])
    assert outputs[-1].layers == (3.0, 0.0)
    assert outputs[-1].saturated


@pytest.mark.parametrize("bad", [*UNUSABLE, -0.1])
def test_a_cost_that_cannot_be_used_holds(bad):
    law = CPR(cpr_bound=0.1)
    state, (before,) = run(law, [of(0.3, 0.3)])
    for unusable in (of(0.3, bad), seen(0.02, layers=()), of(0.3, 0.3, s=math.nan), of(0.0, 0.0, s=0.0)):
        held_state, (held,) = run(law, [unusable], state)
        assert held_state == state
        assert held == replace(before, held=True)


def test_it_starts_without_regularisation_and_has_no_setpoint():
    assert CPR().lambda_start == 0.0
    assert CPR().setpoint is None
