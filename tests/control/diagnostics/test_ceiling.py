"""The ceiling on S, against its formula and against what a run without lambda has measured."""

import pytest

from granite_scu.control.diagnostics.ceiling import Matrix, ceiling, growth

EMBEDDED = growth(
    [Matrix.new(out, 192, 16, scale=2.0) for out in 6 * (768, 192) + 4 * (908, 192)],
    sigma=0.02,
    n_tokens=49_152,
)
"""G of the embedded model's layers but those of attention: enough for the order of magnitude."""

# (sum of learning rates, ParamBPT, DataBPT) of --controller none, rate 1e-3 with 10 steps of warm-up, 100 steps.
MEASURED = [(0.0009, 0.0026, 5.5), (0.0110, 0.2319, 5.64), (0.0225, 0.8485, 5.49), (0.0505, 4.6588, 5.11)]


@pytest.mark.parametrize(("moved", "param_bpt", "data_bpt"), MEASURED)
def test_what_was_measured_lies_below_it_and_not_far_below(moved, param_bpt, data_bpt):
    most = ceiling(EMBEDDED, moved, data_bpt)
    measured = param_bpt / (param_bpt + data_bpt)
    assert measured < most
    assert param_bpt > 0.1 * EMBEDDED * moved**2


def test_it_is_nothing_before_the_first_step_and_never_all():
    assert ceiling(EMBEDDED, 0.0) == 0.0
    assert ceiling(EMBEDDED, 0.01) < ceiling(EMBEDDED, 0.02) < 1
