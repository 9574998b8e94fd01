"""Lines through points, against numpy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.control.diagnostics.fit import line

VALUES = st.lists(st.floats(-100, 100), min_size=4, max_size=30)


@given(VALUES)
def test_the_slope_is_that_of_least_squares(y):
    x = list(range(len(y)))
    assert line(x, y).slope == pytest.approx(np.polyfit(x, y, 1)[0], abs=1e-6)


def test_the_error_covers_the_scatter_of_slopes():
    rng = np.random.default_rng(0)
    x = list(range(30))
    lines = [line(x, list(rng.normal(size=30))) for _ in range(400)]
    spread = np.std([found.slope for found in lines])
    assert np.mean([found.error for found in lines]) == pytest.approx(spread, rel=0.1)


def test_the_corrected_error_covers_it_where_neighbours_are_alike():
    rng = np.random.default_rng(1)
    slopes, plain, corrected = [], [], []
    for _ in range(400):
        noise = [rng.normal()]
        for _ in range(39):
            noise.append(0.6 * noise[-1] + rng.normal())
        found = line(list(range(40)), noise)
        slopes.append(found.slope)
        plain.append(found.error)
        corrected.append(found.corrected_error(40))
    assert np.mean(plain) < 0.7 * np.std(slopes)
    assert np.mean(corrected) == pytest.approx(np.std(slopes), rel=0.2)
