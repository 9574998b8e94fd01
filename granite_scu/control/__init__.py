"""Controllers of lambda: pure Python, each a frozen dataclass with a pure ``update``.

Others are named by where their class is, as ``package.module:Class``.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any, cast

from granite_scu.control.laws.base import Controller, Measurement, Output
from granite_scu.control.laws.open_loop import Cosine, Fixed, Linear, NoControl, OpenLoop
from granite_scu.control.laws.pi import PI

__all__ = [
    "CONTROLLERS",
    "PI",
    "Controller",
    "Cosine",
    "Fixed",
    "Linear",
    "Measurement",
    "NoControl",
    "Output",
    "build",
    "find",
    "tracks",
]

CONTROLLERS: dict[str, type[Controller[Any]]] = {
    "none": NoControl,
    "fixed": Fixed,
    "linear": Linear,
    "cosine": Cosine,
    "pi": PI,
}


def find(name: str) -> type[Controller[Any]]:
    """The class of a controller, by its name or as ``package.module:Class``, which is then imported.

    Raises:
        ValueError: there is none, or the class is no controller.
    """
    if name in CONTROLLERS:
        return CONTROLLERS[name]
    module, colon, kind = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, CONTROLLERS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        known = f"there are {', '.join(CONTROLLERS)}, and others as package.module:Class"
        raise ValueError(f"no controller is called {name!r}; {known}{hint}")
    try:
        found = getattr(import_module(module), kind)
    except Exception as error:  # it runs code that is not ours
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"cannot be imported ({reason}); the folder of {module} must be on PYTHONPATH") from error
    has = {*dir(found), *getattr(found, "__dataclass_fields__", ())}
    if lacks := [part for part in _PARTS if part not in has]:
        raise ValueError(f"is no controller, for it lacks {', '.join(lacks)}; extend one of granite_scu.control.laws")
    if not (isinstance(found, type) and is_dataclass(found) and getattr(found, "__hash__", None) is not None):
        raise ValueError("is no controller, for it is no frozen dataclass; put @dataclass(frozen=True) before it")
    return cast(type[Controller[Any]], found)


_PARTS = ("setpoint", "lambda_start", "init", "update")
"""What ``Controller`` has."""


def tracks(law: type[Controller[Any]]) -> bool:
    """Whether controllers of a class follow a setpoint of S."""
    return "setpoint" in {field.name for field in fields(law)} and not issubclass(law, OpenLoop)


def build(name: str, own: Mapping[str, Any] | None = None, **settings: Any) -> Controller[Any]:
    """The controller of that name, with those of the settings that are its fields.

    One set of settings serves every controller, so the others are passed over; None stands for a field's own default.
    ``own`` are settings that are this controller's alone, and must be fields of it.
    ``target_s`` means ``setpoint``.

    >>> build("fixed", target_s=0.02, kp=1.0, lambda_init=0.1)
    Fixed(setpoint=0.02, ema_alpha=0.5, lambda_init=0.1)

    Raises:
        ValueError: there is no controller of that name, a setting without a default is not given, one is out of its
            range, or one of its own is none of its fields.
    """
    constructor: Callable[..., Controller[Any]] = find(name)
    if "target_s" in settings:
        settings["setpoint"] = settings.pop("target_s")
    known = fields(find(name))
    names = [field.name for field in known]
    if unknown := [each for each in own or () if each not in names]:
        raise ValueError(f"has no setting {unknown[0]}; there are {', '.join(names)}")
    for field in known:
        if isinstance(field.default, int | float) and isinstance((own or {}).get(field.name), str):
            raise ValueError(f"{field.name} {(own or {})[field.name]}: must be a number")
    given = {each: settings[each] for each in names if settings.get(each) is not None} | dict(own or {})
    for field in known:
        if field.name not in given and field.default is MISSING and field.default_factory is MISSING:
            wanted = "target_s, a share such as 0.1" if field.name == "setpoint" else field.name
            raise ValueError(f"give {wanted}; {name} has none by default")
    return constructor(**given)
