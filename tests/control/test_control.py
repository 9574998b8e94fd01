import math
import subprocess
import sys
from dataclasses import fields

import pytest

from granite_scu.control import CONTROLLERS, PI, Fixed, NoControl, build, find, tracks


def test_a_controller_is_built_by_name_from_the_settings_it_has():
    settings = {"target_s": 0.03, "kp": 2.0, "lambda_init": 0.5, "every": 10}
    assert build("pi", **settings) == PI(setpoint=0.03, kp=2.0, lambda_init=0.5)
    assert build("fixed", **settings) == Fixed(setpoint=0.03, lambda_init=0.5)
    assert build("none", **settings) == NoControl(setpoint=0.03)


def test_an_unknown_name_is_refused_with_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError, match=r"'fixd'; there are none, fixed, linear, .*did you mean fixed\?"):
        build("fixd")


OUTSIDE = """
from dataclasses import dataclass

from granite_scu.control.laws.base import Output
from granite_scu.control.laws.feedback import Feedback


@dataclass(frozen=True)
class Stepping(Feedback):
    factor: float = 1.2

    def act(self, error, lam):
        return Output(lam * (self.factor if error > 0 else 1 / self.factor))


class Thawed(Stepping):
    __hash__ = None


class Other:
    pass
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A module of laws that nobody here knows."""
    (tmp_path / "their_laws.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_laws", None)


def test_a_controller_from_outside_is_built_as_those_here_are(outside):
    law = build("their_laws:Stepping", own={"factor": 1.5}, target_s=0.03, kp=2.0, lambda_init=0.1)
    assert (type(law).__name__, law.setpoint, law.lambda_init, law.factor) == ("Stepping", 0.03, 0.1, 1.5)
    assert tracks(type(law)) and tracks(PI) and not tracks(Fixed)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("their_laws:Stepper", "cannot be imported.*Stepper.*PYTHONPATH"),
        ("no_such_module:Stepping", "cannot be imported.*no_such_module.*PYTHONPATH"),
        ("their_laws:Other", "is no controller, for it lacks setpoint"),
        ("their_laws:Thawed", "no frozen dataclass"),
        ("stepping", "no controller is called 'stepping'.*package.module:Class"),
    ],
)
def test_what_is_no_controller_is_refused(outside, name, words):
    with pytest.raises(ValueError, match=words):
        find(name)


def test_a_setting_that_a_controller_has_not_is_refused(outside):
    with pytest.raises(ValueError, match=r"has no setting gain; there are setpoint, .*factor"):
        build("their_laws:Stepping", own={"gain": 1.0}, target_s=0.03)
    with pytest.raises(ValueError, match="factor much: must be a number"):
        build("their_laws:Stepping", own={"factor": "much"}, target_s=0.03)


def test_a_setting_that_is_none_leaves_the_controllers_own_default():
    assert build("pi", target_s=0.02, kp=None, lambda_init=None) == build("pi", target_s=0.02)


@pytest.mark.parametrize("settings", [{}, {"target_s": None, "kp": 1.0}])
def test_a_setting_without_a_default_that_is_not_given_is_asked_for(settings):
    with pytest.raises(ValueError, match=r"give target_s, .*; pi has none by default"):
        build("pi", **settings)


OUT_OF_RANGE = {
    "fixed": {"setpoint": (0.0, 1.0), "ema_alpha": (0.0,), "lambda_init": (-1.0,)},
    "linear": {"lambda_end": (0.0, math.nan), "lambda_init": (1e9,), "setpoint": (2.0,)},
    "pi": {
        **{"setpoint": (0.0, 1.0), "kp": (-1.0,), "ki": (math.nan,), "ema_alpha": (0.0,), "deadband": (-0.1,)},
        **{"error_limit": (0.0,), "data_alpha": (1.5,), "kp_limit": (0.0,), "integral_time": (math.inf,)},
        "lambda_init": (1e9,),
    },
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_settings_out_of_range_are_refused(name):
    given = {"setpoint": 0.02} if "setpoint" in {field.name for field in fields(CONTROLLERS[name])} else {}
    for setting, values in OUT_OF_RANGE[name].items():
        for value in values:
            with pytest.raises(ValueError, match=setting):
                CONTROLLERS[name](**given | {setting: value})


def test_importing_it_loads_only_the_standard_library():
    code = """
import sys
before = set(sys.modules)
import granite_scu.control, granite_scu.control.diagnostics.metrics
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
assert loaded <= {*sys.stdlib_module_names, "granite_scu"}, loaded
ours = {name for name in sys.modules if name.startswith("granite_scu.")}
assert all(name.startswith("granite_scu.control") for name in ours), ours
"""
    subprocess.run([sys.executable, "-c", code], check=True)
