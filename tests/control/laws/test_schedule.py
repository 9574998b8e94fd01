import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import ERRORS, MEASUREMENTS, check, run, seen

from granite_scu.control import Cosine, Linear

STRENGTHS = st.floats(1e-3, 1e3)


def course(law, *progress: float) -> list[float]:
    return [output.reg_strength for output in run(law, [seen(0.02, progress=p) for p in progress])[1]]


def test_a_line_worked_out_by_hand():
    law = Linear(lambda_init=2.0, lambda_end=0.4)
    assert law.initial_strength == 2.0
    assert course(law, 0.0, 0.25, 0.5, 1.0) == pytest.approx([2.0, 1.6, 1.2, 0.4])


def test_half_a_cosine_worked_out_by_hand():
    law = Cosine(lambda_init=2.0, lambda_end=0.4)
    assert course(law, 0.0, 0.25, 0.5, 1.0) == pytest.approx([2.0, 1.2 + 0.8 / math.sqrt(2), 1.2, 0.4])


@pytest.mark.parametrize("kind", [Linear, Cosine])
def test_it_ends_exactly_where_it_is_told_to_whichever_end_is_the_larger(kind):
    assert course(kind(lambda_init=0.1, lambda_end=0.7), 0.0, 1.0) == [0.1, 0.7]
    assert course(kind(lambda_init=0.3, lambda_end=0.3), 0.0, 0.4, 1.0) == pytest.approx([0.3] * 3)


@pytest.mark.parametrize("kind", [Linear, Cosine])
def test_s_changes_nothing_and_is_marked_where_it_cannot_be_used(kind):
    law = kind(setpoint=0.02)
    measurements = [seen(0.02 * math.exp(error), progress=0.5) for error in ERRORS]
    _, outputs = run(law, measurements)
    assert {output.reg_strength for output in outputs} == set(course(law, 0.5))
    assert [output.held for output in outputs] == [False, False, True, True, False]
    assert outputs[3].smoothed == outputs[1].smoothed


@settings(max_examples=40)
@given(st.sampled_from([Linear, Cosine]), STRENGTHS, STRENGTHS, MEASUREMENTS)
def test_invariants(kind, start, end, measurements):
    check(kind(setpoint=0.02, lambda_init=start, lambda_end=end), measurements, *sorted((start, end)))
