"""The laws that are here still do what they did. Their trajectories are written by

    PYTHONPATH=.:tests/golden python research/tests/laws/test_golden.py

and compared as those of the package's are: tests/golden/make.py.
"""

import math
from functools import partial
from pathlib import Path

import make
import pytest

from granite_scu.control import build
from research.laws import OWN, place_of
from research.laws.cascade import PROBED_SCALE, AdapterBenefit

FOLDER = Path(__file__).parents[1] / "golden"
SETTINGS = {
    "original": {"kp": 3.0, "ki": 2.0},
    "cpr": {"cpr_warmup": 4},
    "replay": {"steps": (5, 20, 60, 61, 150), "lams": (0.4, 0.2, 0.0, 1.2, 0.7), "initial": 0.3},
}


class Plant(make.Plant):
    """With what the sensors of KL and Cascade read: a KL as large as the bits of the update, and what is saved at every
    fourth tick. The longer it has trained, the less of it carries over: from 0.9 to 0.24."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def sense(self, tick: int, total: float) -> dict[str, float]:
        def saved(scale: float, bend: float) -> float:
            return 1.6 * scale * total - bend * (scale * total) ** 2

        figures = (saved(scale, bend) for bend in (9.0 + tick / 2, 8.0) for scale in (1.0, PROBED_SCALE))
        benefit = {f"saved_{name}": value for name, value in zip(AdapterBenefit._fields, figures, strict=True)}
        kl = math.inf if tick == make.FAILED else total
        return {"kl": {"kl_bpt": kl}, "cascade": benefit if tick and tick % 4 == 0 else {}}.get(self.name, {})


def law(name: str):
    return build(place_of(name), **make.SETTINGS | SETTINGS.get(name, {}))


@pytest.mark.parametrize("name", OWN)
def test_a_law_follows_its_golden_trajectory(name):
    make.check(FOLDER, name, law(name), partial(Plant, name))


def test_there_is_a_trajectory_for_each_law_and_for_nothing_else():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(OWN)


if __name__ == "__main__":
    for name in OWN:
        make.write(FOLDER, name, law(name), partial(Plant, name))
