"""Laws of any settings and measurements of any kind, for what holds for every controller."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

from hypothesis import strategies as st

from granite_scu.control import (
    PI,
    Controller,
    Cosine,
    Fixed,
    Linear,
    Measurement,
    NoControl,
    Output,
)
from granite_scu.control.laws.base import as_stored, restored

UNUSABLE = [math.nan, math.inf, -math.inf]
ERRORS = [0.0, 3.0, math.inf, math.nan, 0.0]
"""Errors in ln S, two of them unusable, with which each law is called directly."""


def seen(s: float, *, layers: tuple[float, ...] = (0.04, 0.06), **more: Any) -> Measurement:
    return Measurement(**{"s": s, "data_bpt": 2.0, "param_bpt": math.fsum(layers), "layers": layers, **more})


NUMBERS = st.one_of(st.floats(0, 1e3), st.sampled_from([0.0, *UNUSABLE]))
SENSED = st.one_of(st.floats(-20, 20), st.sampled_from(UNUSABLE))


def measurements(*sensed: str) -> st.SearchStrategy[list[Measurement]]:
    """Courses of ticks, at some of which a sensor has read figures of these names."""
    return st.lists(
        st.builds(
            Measurement,
            s=st.one_of(st.floats(1e-9, 1, exclude_max=True), st.sampled_from([0.0, -0.1, *UNUSABLE])),
            data_bpt=NUMBERS,
            param_bpt=NUMBERS,
            layers=st.tuples(NUMBERS, NUMBERS, NUMBERS),
            step=st.integers(0, 100),
            progress=st.floats(0, 1),
            lr_sum=st.floats(0, 1),
            sensed=st.one_of(st.just({}), st.fixed_dictionaries(dict.fromkeys(sensed, SENSED))),
        ),
        max_size=30,
    )


MEASUREMENTS = measurements()


def check_invariants(law: Controller[Any], measurements: list[Measurement]) -> None:
    """Lambda within its bounds, nothing that JSON cannot say, equal results for equal arguments, and a state that goes
    through JSON unchanged."""
    bounded = getattr(law, "law", law)  # what a wrapper is around
    low, high = getattr(bounded, "lambda_min", 0.0), getattr(bounded, "lambda_max", 1e3)
    state, outputs = run(law, measurements)
    for output in outputs:
        json.dumps(asdict(output), allow_nan=False)
        assert all(low <= lam <= high for lam in (output.lam, *(output.layers or ())))
        assert output.param_bound is None or output.param_bound >= 0  # of the smallest number there is, a half is zero
    assert run(law, measurements) == (state, outputs)
    again = restored(law.init(), json.loads(json.dumps(as_stored(asdict(state)), allow_nan=False)))
    assert again == state
    assert run(law, measurements, again) == run(law, measurements, state)


def check_held(law: Controller[Any], bad: float) -> None:
    """A tick whose S is no measurement is held."""
    assert law.update(law.init(), seen(bad))[1].lam == law.lambda_start
    state, (_, before) = run(law, [seen(0.01), seen(0.03)])
    held_state, (held,) = run(law, [seen(bad)], state)
    assert held_state == state
    assert held == replace(before, held=True)


def run(law: Controller[Any], measurements: list[Measurement], state: Any = None) -> tuple[Any, list[Output]]:
    """The state after the measurements, and the output of each."""
    state = law.init() if state is None else state
    outputs = []
    for measurement in measurements:
        state, output = law.update(state, measurement)
        outputs.append(output)
    return state, outputs


ALPHAS, GAINS, STRENGTHS = st.floats(0.05, 1), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)
BOUNDS = {"lambda_min": st.floats(1e-8, 0.01), "lambda_max": st.floats(100, 1e8)}
PI_GAINS = st.one_of(st.none(), st.floats(0, 20))
LAWS: dict[str, st.SearchStrategy[Controller[Any]]] = {
    "none": st.builds(NoControl, ema_alpha=ALPHAS),
    "fixed": st.builds(Fixed, lambda_init=st.floats(0, 1e3)),
    "linear": st.builds(Linear, lambda_init=STRENGTHS, lambda_end=STRENGTHS),
    "cosine": st.builds(Cosine, lambda_init=STRENGTHS, lambda_end=STRENGTHS),
    "pi": st.builds(
        PI,
        setpoint=st.floats(1e-4, 0.9),
        kp=PI_GAINS,
        ki=PI_GAINS,
        ema_alpha=ALPHAS,
        data_alpha=ALPHAS,
        deadband=st.floats(0, 0.2),
        error_limit=st.floats(0.1, 5),
        lambda_init=st.one_of(st.none(), st.floats(0.01, 100)),
        **BOUNDS,
    ),
}
