"""Controllers of lambda: pure Python, each a frozen dataclass with a pure ``update``.

A new one is a class in a file of its own and a line in ``CONTROLLERS``.
"""

import difflib
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, cast

from granite_scu.control.laws.auto import START, AutoSetpoint
from granite_scu.control.laws.base import Controller, Measurement, Output
from granite_scu.control.laws.cascade import Cascade
from granite_scu.control.laws.cpr import CPR
from granite_scu.control.laws.i import Integral
from granite_scu.control.laws.kl import KL
from granite_scu.control.laws.open_loop import Cosine, Fixed, Linear, NoControl
from granite_scu.control.laws.original import Original
from granite_scu.control.laws.p import Proportional
from granite_scu.control.laws.pi import PI
from granite_scu.control.laws.projection import Projection
from granite_scu.control.laws.replay import Replay

__all__ = [
    "CONTROLLERS",
    "CPR",
    "FROM_LAMBDA_INIT",
    "KL",
    "PI",
    "STEERING",
    "TRACKING",
    "AutoSetpoint",
    "Cascade",
    "Controller",
    "Cosine",
    "Fixed",
    "Integral",
    "Linear",
    "Measurement",
    "NoControl",
    "Original",
    "Output",
    "Projection",
    "Proportional",
    "Replay",
    "build",
]

CONTROLLERS: dict[str, type[Controller[Any]]] = {
    "none": NoControl,
    "fixed": Fixed,
    "linear": Linear,
    "cosine": Cosine,
    "pi": PI,
    "p": Proportional,
    "i": Integral,
    "original": Original,
    "kl": KL,
    "cpr": CPR,
    "projection": Projection,
    "replay": Replay,
    "cascade": Cascade,
}

AUTO = "auto"
"""In place of a setpoint: the run finds it."""

STEERING = ("pi", "p", "i", "original")
"""The controllers that move lambda so that S holds a setpoint."""
TRACKING = (*STEERING, "projection")
"""The controllers that follow a setpoint of S."""
FROM_LAMBDA_INIT = tuple(name for name, law in CONTROLLERS.items() if "lambda_init" in law.__dataclass_fields__)
"""The controllers whose first lambda is ``lambda_init``. The others have none, or that of a recording, or start from 0;
cascade starts from the one that pi expects to hold S* = 20 %."""


def build(name: str, **settings: Any) -> Controller[Any]:
    """The controller of that name, with those of the settings that are its fields.

    One set of settings serves every controller, so the others are passed over; None stands for a field's own default.
    ``target_s`` means ``setpoint``; where it is auto, pi's setpoint is moved by ``AutoSetpoint``.

    >>> build("fixed", target_s=0.02, kp=1.0, lambda_init=0.1)
    Fixed(setpoint=0.02, ema_alpha=0.5, lambda_init=0.1)

    Raises:
        ValueError: there is no controller of that name, a setting without a default is not given, or one is out of its
            range.
    """
    if name not in CONTROLLERS:
        close = difflib.get_close_matches(name, CONTROLLERS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"no controller is called {name!r}; there are {', '.join(CONTROLLERS)}{hint}")
    if settings.get("target_s") == AUTO:
        if name != "pi":
            raise ValueError(f"give target_s a number, such as 0.1: {AUTO} moves the setpoint of pi alone")
        return AutoSetpoint(cast(PI, build(name, **settings | {"target_s": START})))
    if "target_s" in settings:
        settings["setpoint"] = settings.pop("target_s")
    constructor: Callable[..., Controller[Any]] = CONTROLLERS[name]
    own = fields(CONTROLLERS[name])
    given = {f.name: settings[f.name] for f in own if settings.get(f.name) is not None}
    for field in own:
        if field.name not in given and field.default is MISSING and field.default_factory is MISSING:
            wanted = "target_s" if field.name == "setpoint" else field.name
            raise ValueError(f"give {wanted}; {name} has none by default")
    return constructor(**given)
