"""What holds for every controller, of those that are here."""

import math
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import ALPHAS, BOUNDS, GAINS, STRENGTHS, UNUSABLE, check_held, check_invariants, measurements

from granite_scu.config.settings import ControlConfig
from granite_scu.control import PI, build, find
from research.laws import OWN, place_of
from research.laws.auto import AutoSetpoint
from research.laws.cascade import AdapterBenefit, Cascade
from research.laws.cpr import CPR
from research.laws.i import Integral
from research.laws.kl import KL
from research.laws.original import Original
from research.laws.p import Proportional
from research.laws.projection import Projection
from research.laws.replay import Replay
from research.laws.ziegler import Ziegler

LAWS = {
    "p": st.builds(Proportional, setpoint=st.just(0.02), kp=GAINS, ema_alpha=ALPHAS, **BOUNDS),
    "i": st.builds(Integral, setpoint=st.just(0.02), ki=GAINS, ema_alpha=ALPHAS, **BOUNDS),
    "original": st.builds(Original, kp=st.floats(1e-3, 1e4), ki=GAINS),
    "kl": st.builds(KL, kp=st.floats(1e-3, 4.9), target_kl=st.floats(1e-6, 1e3), **BOUNDS),
    "cpr": st.builds(
        CPR,
        cpr_bound=st.one_of(st.none(), st.floats(1e-300, 1e3)),
        cpr_warmup=st.integers(1, 5),
        lambda_max=BOUNDS["lambda_max"],
    ),
    "projection": st.builds(Projection, setpoint=st.floats(1e-4, 0.99), ema_alpha=ALPHAS),
    "cascade": st.builds(Cascade, gain=st.floats(0.1, 10), limit=st.floats(0.1, 3), ema_alpha=ALPHAS, **BOUNDS),
    "replay": st.builds(Replay, steps=st.just((0, 20)), lams=st.tuples(STRENGTHS, STRENGTHS)),
    "ziegler": st.builds(Ziegler, setpoint=st.just(0.02), gain=st.floats(0.01, 1), ema_alpha=ALPHAS, **BOUNDS),
}


AUTO = st.builds(AutoSetpoint, st.builds(PI, setpoint=st.floats(1e-4, 0.9), **BOUNDS), rate=st.floats(0.01, 3))
SENSED = (
    *("kl_bpt", "savings_held_out", "savings_held_out_slope"),
    *(f"saved_{name}" for name in AdapterBenefit._fields),
)
"""Whatever the sensors of these laws read."""


def test_every_law_is_tried():
    assert LAWS.keys() == OWN.keys()


@pytest.mark.parametrize("name", [*LAWS, "auto"])
@settings(max_examples=40)
@given(st.data(), measurements(*SENSED))
def test_invariants(name, data, ticks):
    check_invariants(data.draw((LAWS | {"auto": AUTO})[name]), ticks)


MUST_HAVE = {"replay": {"steps": [1], "lams": [0.1]}}
"""Settings without a default."""


@pytest.mark.parametrize("bad", UNUSABLE)
@pytest.mark.parametrize("name", OWN)
def test_a_tick_whose_s_is_no_measurement_is_held(name, bad):
    check_held(build(place_of(name), target_s=0.02, **MUST_HAVE.get(name, {})), bad)


@pytest.mark.parametrize("name", OWN)
def test_the_command_line_takes_it_by_its_place(name):
    own = [f"{setting}={value}" for setting, value in MUST_HAVE.get(name, {}).items()]
    law = ControlConfig(controller=place_of(name), target_s=0.02, controller_args=own or None).law()
    assert type(law) is OWN[name] is find(place_of(name))


OUT_OF_RANGE = {
    "auto": {"rate": (0.0,), "first_rate": (0.0,), "doubt": (-1.0,), "ahead": (1.0, math.nan)},
    "kl": {"target_kl": (0.0,), "kp": (5.0, -1.0), "ema_alpha": (0.0,)},
    "cpr": {"cpr_bound": (0.0, -1.0), "cpr_warmup": (0,), "mu": (0.0,)},
    "cascade": {
        **{"start": (0.0, 0.009, 1.0), "aim": (1.0,), "gain": (0.0,), "limit": (math.inf,), "ema_alpha": (0.0,)},
        "lambda_min": (0.0,),
    },
    "p": {"kp": (0.0, math.inf), "setpoint": (0.0,), "ema_alpha": (2.0,), "lambda_init": (0.0,)},
    "i": {"ki": (0.0, math.nan), "deadband": (-1.0,), "error_limit": (0.0,), "lambda_init": (1e7,)},
    "original": {"kp": (-1.0,), "ki": (0.0,), "deadband": (math.nan,), "leak": (0.0,), "integral_limit": (0.0,)},
    "projection": {"setpoint": (1.0, math.nan), "ema_alpha": (0.0,)},
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_settings_out_of_range_are_refused(name):
    kind = (OWN | {"auto": AutoSetpoint})[name]
    given = {"setpoint": 0.02} if "setpoint" in {field.name for field in fields(kind)} else {}
    for setting, values in OUT_OF_RANGE[name].items():
        for value in values:
            with pytest.raises(ValueError, match=setting):
                kind(**given | {setting: value})
