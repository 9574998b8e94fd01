"""The laws of the comparison: those of the package, by their names there, and those that are here."""

from typing import Any

from granite_scu.control import CONTROLLERS, Controller
from research.laws.cascade import Cascade
from research.laws.cpr import CPR
from research.laws.i import Integral
from research.laws.kl import KL
from research.laws.original import Original
from research.laws.p import Proportional
from research.laws.projection import Projection
from research.laws.replay import Replay
from research.laws.ziegler import Ziegler

OWN: dict[str, type[Controller[Any]]] = {
    "p": Proportional,
    "i": Integral,
    "original": Original,
    "kl": KL,
    "cpr": CPR,
    "projection": Projection,
    "cascade": Cascade,
    "ziegler": Ziegler,
    "replay": Replay,
}
AUTO = "research.laws.auto:AutoSetpoint"
"""What ``--controller`` is given for PI whose setpoint moves, which records call pi at a setpoint of ``auto``."""

LAWS = CONTROLLERS | OWN
"""By the names that finished runs have them by."""


def place_of(name: str) -> str:
    """What ``--controller`` is given for a law: its name, or where its class is."""
    law = LAWS[name]
    return name if name in CONTROLLERS else f"{law.__module__}:{law.__name__}"
