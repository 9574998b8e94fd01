"""The laws that are here still do what they did. Their trajectories are written by

    PYTHONPATH=.:tests/golden python research/tests/laws/test_golden.py

and compared as those of the package's are: tests/golden/make.py.
"""

from pathlib import Path

import make
import pytest

from granite_scu.control import build
from research.laws import OWN, place_of

FOLDER = Path(__file__).parents[1] / "golden"
SETTINGS = {
    "original": {"kp": 3.0, "ki": 2.0},
    "cpr": {"cpr_warmup": 4},
    "replay": {"steps": (5, 20, 60, 61, 150), "lams": (0.4, 0.2, 0.0, 1.2, 0.7), "initial": 0.3},
}


def law(name: str):
    return build(place_of(name), **make.SETTINGS | SETTINGS.get(name, {}))


@pytest.mark.parametrize("name", OWN)
def test_a_law_follows_its_golden_trajectory(name):
    make.check(FOLDER, name, law(name))


def test_there_is_a_trajectory_for_each_law_and_for_nothing_else():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(OWN)


if __name__ == "__main__":
    for name in OWN:
        make.write(FOLDER, name, law(name))
