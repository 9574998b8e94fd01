"""Every controller still does what it did: see ``make.py``."""

import make
import pytest


@pytest.mark.parametrize("case", make.CASES)
def test_a_controller_follows_its_golden_trajectory(case):
    make.check(make.FOLDER, case, make.controller(case))


def test_there_is_a_trajectory_for_each_case_and_for_nothing_else():
    assert {path.stem for path in make.FOLDER.glob("*.json")} == set(make.CASES)
