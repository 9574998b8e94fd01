"""What holds for every controller, whatever is measured."""

import json
import math
from dataclasses import asdict
from typing import Any

from hypothesis import strategies as st

from granite_scu.control import Controller, Measurement, Output
from granite_scu.control.laws.base import restored

UNUSABLE = [math.nan, math.inf, -math.inf]
ERRORS = [0.0, 3.0, math.inf, math.nan, 0.0]
"""Errors in ln S, two of them unusable, with which each law is called directly."""


def seen(s: float, *, layers: tuple[float, ...] = (0.04, 0.06), **more: Any) -> Measurement:
    return Measurement(**{"s": s, "data_bpt": 2.0, "param_bpt": math.fsum(layers), "layers": layers, "kl": 0.1, **more})


NUMBERS = st.one_of(st.floats(0, 1e3), st.sampled_from([0.0, *UNUSABLE]))
MEASUREMENTS = st.lists(
    st.builds(
        Measurement,
        s=st.one_of(st.floats(1e-9, 1, exclude_max=True), st.sampled_from([0.0, -0.1, *UNUSABLE])),
        data_bpt=NUMBERS,
        param_bpt=NUMBERS,
        layers=st.tuples(NUMBERS, NUMBERS, NUMBERS),
        kl=st.one_of(st.none(), NUMBERS),
        step=st.integers(0, 100),
        progress=st.floats(0, 1),
        travel=st.floats(0, 1),
    ),
    max_size=30,
)


def run(law: Controller[Any], measurements: list[Measurement], state: Any = None) -> tuple[Any, list[Output]]:
    """The state after the measurements, and the output of each."""
    state = law.init() if state is None else state
    outputs = []
    for measurement in measurements:
        state, output = law.update(state, measurement)
        outputs.append(output)
    return state, outputs


def check(law: Controller[Any], measurements: list[Measurement], low: float, high: float) -> None:
    """Lambda within its bounds, nothing that JSON cannot say, equal results for equal arguments, and a state that
    goes through JSON unchanged."""
    state, outputs = run(law, measurements)
    for output in outputs:
        json.dumps(asdict(output), allow_nan=False)
        assert all(low <= strength <= high for strength in (output.reg_strength, *(output.layers or ())))
    assert run(law, measurements) == (state, outputs)
    again = restored(law.init(), json.loads(json.dumps(asdict(state), allow_nan=False)))
    assert again == state
    assert run(law, measurements, again) == run(law, measurements, state)
