import math

import pytest
from invariants import run, seen

from granite_scu.control import Cosine, Fixed, Linear, NoControl


def course(law, *progress: float) -> list[float]:
    return [output.lam for output in run(law, [seen(0.02, progress=p) for p in progress])[1]]


def test_a_constant_is_the_same_everywhere():
    assert course(Fixed(lambda_init=0.3), 0.0, 0.5, 1.0) == [0.3] * 3 and Fixed(lambda_init=0.3).lambda_start == 0.3
    assert course(NoControl(), 0.0, 0.5, 1.0) == [0.0] * 3 and NoControl().lambda_start == 0.0


def test_a_line_worked_out_by_hand():
    law = Linear(lambda_init=2.0, lambda_end=0.4)
    assert law.lambda_start == 2.0
    assert course(law, 0.0, 0.25, 0.5, 1.0) == pytest.approx([2.0, 1.6, 1.2, 0.4])


def test_half_a_cosine_worked_out_by_hand():
    law = Cosine(lambda_init=2.0, lambda_end=0.4)
    assert course(law, 0.0, 0.25, 0.5, 1.0) == pytest.approx([2.0, 1.2 + 0.8 / math.sqrt(2), 1.2, 0.4])


@pytest.mark.parametrize("kind", [Linear, Cosine])
def test_it_ends_exactly_where_it_is_told_to_whichever_end_is_the_larger(kind):
    assert course(kind(lambda_init=0.1, lambda_end=0.7), 0.0, 1.0) == [0.1, 0.7]
    assert course(kind(lambda_init=0.3, lambda_end=0.3), 0.0, 0.4, 1.0) == pytest.approx([0.3] * 3)
