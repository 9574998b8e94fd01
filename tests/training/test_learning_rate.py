import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.config.settings import OptimizerConfig
from granite_scu.training.learning_rate import PlannedRates, schedule


def test_the_rates_of_warm_up_and_a_linear_fall_add_up():
    planned = PlannedRates(OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=3), 7)
    assert [planned.after(step) for step in range(8)] == pytest.approx([0, 0.25, 0.75, 1.5, 2.5, 3.25, 3.75, 4.0])


@given(st.sampled_from(["cosine", "linear", "constant"]), st.integers(0, 30), st.integers(1, 60))
def test_the_closed_form_is_the_sum_of_the_schedule(course, warmup, steps):
    planned = PlannedRates(OptimizerConfig(learning_rate=0.5, schedule=course, warmup_steps=warmup), steps)
    rates = (0.5 * schedule(step, course, warmup, steps) for step in range(steps))
    assert [planned.after(step) for step in range(steps + 1)] == pytest.approx([*accumulate(rates, initial=0.0)])
    assert planned.after(steps + 5) == planned.after(steps)


def test_a_run_of_any_length_is_summed_at_once():
    planned = PlannedRates(OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=0), 10**12)
    assert planned.after(10**12) == pytest.approx(0.5 * 10**12) and math.isfinite(planned.after(1))
