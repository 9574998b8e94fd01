import math

import pytest
from invariants import run, seen

from research.laws.replay import Replay


def test_lambda_is_that_of_the_last_tick_at_or_before_the_step():
    law = Replay(steps=(4, 8), lams=(0.2, 0.3), initial=0.1)
    assert law.lambda_start == 0.1
    steps = (0, 3, 4, 7, 8, 100)
    found = [output.lam for output in run(law, [seen(0.02, step=step) for step in steps])[1]]
    assert found == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": ()},
        {"steps": (1, 2), "lams": (0.1,)},
        {"steps": (2, 1), "lams": (0.1, 0.1)},
        {"steps": (1,), "lams": (math.nan,)},
        {"steps": (1,), "lams": (0.1,), "initial": -1.0},
    ],
)
def test_a_recording_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match=r"steps|lams"):
        Replay(**bad)
