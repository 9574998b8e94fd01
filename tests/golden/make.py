"""Regenerates the golden trajectories of the controllers, one JSON file each:

    python tests/golden/make.py                 all of them
    python tests/golden/make.py pi-given cpr    these

A trajectory is what a controller puts out on a fixed simulated plant. ``test_golden.py`` compares it to 1e-9, so that a
law changes only on purpose: look at the difference that regenerating makes before committing it. Mathematical libraries
differ in the last of 53 bits of an exponential or a sine; 1e-9 leaves room for ten million such roundings.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from granite_scu.control import CONTROLLERS, Controller, Measurement, Output, build
from granite_scu.control.laws.base import as_stored

FOLDER = Path(__file__).parent
TICKS = 48
EVERY = 5
"""Optimizer steps between ticks."""
FAILED = 11
"""The tick whose measurement is not finite."""
SURGE = range(16, 26)
"""Ticks in which the data pulls the adapter hard, so that lambda saturates."""
LEARNING_RATE = 3e-4
"""Of the first steps; it falls to 0 along a cosine, so that a gain schedule runs from its least to its limits."""

SETTINGS: dict[str, Any] = {"target_s": 0.02, "lambda_init": 0.5, "lambda_min": 0.05, "lambda_max": 1.5}
OF_PI: dict[str, dict[str, Any]] = {
    "pi-feed-forward": {"target_s": 0.05, "lambda_init": None},
    "pi-deadband": {"deadband": 0.1},
    "pi-given": {"kp": 2.0, "ki": 0.3},
}
"""Settings under which parts of the law act that the trajectory ``pi`` leaves out; the first rests on both bounds."""
CASES = (*CONTROLLERS, *OF_PI)
"""The trajectories there are."""


class Plant:
    """Three matrices whose bits per token rest at A_i / (1 + lambda_i) and get there with a lag of six ticks.

    The loss falls as they grow and swings by one per cent; the KL from the base is as large as their sum.
    """

    def __init__(self) -> None:
        self.layers = [0.0, 0.0, 0.0]
        self.lr_sum = 0.0

    def advance(self, tick: int, action: Output) -> None:
        self.lr_sum += EVERY * LEARNING_RATE * (1 + math.cos(math.pi * (tick - 1) / TICKS)) / 2
        surge = 6.0 if tick in SURGE else 1.0
        lams = action.layers or (action.lam,) * 3
        for i, (pull, lam) in enumerate(zip((0.02, 0.05, 0.08), lams, strict=True)):
            self.layers[i] += (surge * pull / (1 + lam) - self.layers[i]) / 6
        total = math.fsum(self.layers)
        if action.param_bound is not None and total > action.param_bound:
            self.layers = [layer * action.param_bound / total for layer in self.layers]

    def measure(self, tick: int) -> Measurement:
        total = math.fsum(self.layers)
        data = (3.5 - 2 * total) * (1 + 0.01 * math.sin(1.7 * tick))
        failed = tick == FAILED
        return Measurement(
            s=math.nan if failed else total / (data + total),
            data_bpt=math.nan if failed else data,
            param_bpt=total,
            layers=tuple(self.layers),
            step=EVERY * tick,
            progress=tick / TICKS,
            lr_sum=self.lr_sum,
            sensed=self.sense(tick, total),
        )

    def sense(self, tick: int, total: float) -> dict[str, float]:
        """What a law's own sensor would read."""
        return {}


def controller(case: str) -> Controller[Any]:
    """The controller of a golden trajectory."""
    if case in OF_PI:
        return build("pi", **SETTINGS | OF_PI[case])
    return build(case, **SETTINGS)


def trajectory(law: Controller[Any], plant: Plant) -> list[dict[str, Any]]:
    """The outputs of a controller on the plant, tick by tick. At the first nothing is learned yet: S = 0."""
    state, output = law.init(), Output(law.lambda_start)
    outputs = []
    for tick in range(TICKS + 1):
        if tick:
            plant.advance(tick, output)
        state, output = law.update(state, plant.measure(tick))
        outputs.append(as_stored(asdict(output)))
    return json.loads(json.dumps(outputs, allow_nan=False))


def write(folder: Path, case: str, law: Controller[Any], plant: Callable[[], Plant] = Plant) -> None:
    lines = ",\n".join(json.dumps(output) for output in trajectory(law, plant()))
    (folder / f"{case}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def check(folder: Path, case: str, law: Controller[Any], plant: Callable[[], Plant] = Plant) -> None:
    """Assert that a controller still does what it did when its trajectory was written."""
    found, expected = trajectory(law, plant()), json.loads((folder / f"{case}.json").read_text(encoding="utf-8"))
    assert len(found) == len(expected) == TICKS + 1
    for tick, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for key, value in other.items():
            near = (
                one[key] == value
                if value is None or isinstance(value, bool | list)
                else math.isclose(one[key], value, rel_tol=1e-9, abs_tol=1e-12)
            )
            assert near, (tick, key, one[key], value)


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        write(FOLDER, case, controller(case))
