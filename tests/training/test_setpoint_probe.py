"""What ``--target-s auto`` makes of its probe; how it runs is in ``integration/test_setpoints.py``."""

import math

from granite_scu.control.diagnostics.setpoint import Point
from granite_scu.training.setpoint_probe import _s_at


def test_s_at_the_turn_is_that_of_the_nearest_tick_with_a_measurement():
    points = [Point(4, 1.0, 0.1, 0.9), Point(8, 2.0, 0.2, math.nan), Point(12, 3.0, 0.3, 0.7)]
    assert _s_at(9, points) == 0.3
    assert _s_at(5, points) == 0.1
    assert _s_at(None, points) is None
