"""Every controller still does what it did: see ``make.py``."""

import json

import make
import pytest


def golden(case: str) -> list[dict]:
    return json.loads((make.FOLDER / f"{case}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", make.CASES)
def test_a_controller_follows_its_golden_trajectory(case):
    found, expected = make.trajectory(case), golden(case)
    assert len(found) == len(expected) == make.TICKS + 1
    for tick, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for key, value in other.items():
            exact = value is None or isinstance(value, bool)
            assert one[key] == (value if exact else pytest.approx(value, rel=1e-9, abs=1e-12)), (tick, key)


def test_there_is_a_trajectory_for_each_case_and_for_nothing_else():
    assert {path.stem for path in make.FOLDER.glob("*.json")} == set(make.CASES)
