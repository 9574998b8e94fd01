"""The grid of ``research.tracking``: its cells, and the name that a cell's finished run is known by."""

import hashlib
import json
import os
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import product
from typing import Any

from granite_scu.data.sources import files, hub
from granite_scu.data.sources import read as sources
from granite_scu.data.sources.corpora import EMBEDDED
from research.comparison import evidence
from research.laws import LAWS

STEPS, EVERY, TOKENS = 1400, 10, 24_576
"""Of a run: its optimizer steps, those from tick to tick, and N."""
SETPOINTS = (0.004, 0.02, 0.1, 0.5)
RATES = (6e-4, 1.8e-3)
RANKS = (16, 8)
CORPORA = ("stdlib-docs", "stdlib-source")
DISTURBANCES = ("learning rate x3", "corpus switched", "S* x1.5", "S* /1.5")
FIRST_VERSION = 2
"""The ``evidence.VERSION`` that runs stand for in whose names there is none."""


@dataclass(frozen=True)
class TrackingCell:
    """One run of the grid; ``content`` is the ``digest`` of a text of the user's own, ``precision`` that of a CPU which
    does not compute in bf16, as the published runs are."""

    setpoint: float
    learning_rate: float
    rank: int
    corpus: str
    seed: int
    disturbance: str | None = None
    controller: str = "pi"
    settings: tuple[str, ...] = ()
    steps: int = STEPS
    content: str = ""
    precision: str = ""

    @classmethod
    def of(cls, result: dict[str, Any]) -> "TrackingCell":
        """The cell of a run, in whose file a tuple is a list."""
        return cls(**{**result["cell"], "settings": tuple(result["cell"]["settings"])})

    def key(self) -> str:
        """Names the finished run; it changes with the law's defaults and code, and with a text of the user's own."""
        law = {field.name: field.default for field in fields(LAWS[self.controller])}
        law = {name: str(default) for name, default in law.items() if default is not MISSING}
        law.pop("lead", None)  # it came later, and is 0 but for drift
        # Without what is "", as those runs are named that were finished before it was part of the name.
        own = {name: value for name, value in asdict(self).items() if name not in ("content", "precision") or value}
        code = evidence.revisions(self.controller)
        if evidence.VERSION != FIRST_VERSION:
            code["every law"] = evidence.VERSION
        # The code, too, is only in the names of runs of a later one.
        described = json.dumps([own, law, EVERY, TOKENS, *([code] if code else [])], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        name = f"{self.setpoint:.2%} rate {self.learning_rate:g} rank {self.rank} {self.corpus} seed {self.seed}"
        return f"{name}, {self.disturbance}" if self.disturbance else name


def digest(corpus: str) -> str:
    """Stands for what the files of a text hold, so that an edited one is trained on anew; "" for a corpus with a name.

    Raises:
        UserError: there is nothing there, or nothing that can be read.
    """
    if corpus in EMBEDDED or hub.is_on_hub(corpus):
        return ""
    whole = hashlib.sha256()
    for path in sources.readable_files(corpus):
        of_file = hashlib.sha256()
        with files.opened(path, as_it_is=True) as stream:
            while piece := stream.read(files.PIECE):
                of_file.update(piece)
        whole.update(os.fsencode(path) + f"\0{of_file.hexdigest()}\0".encode())
    return whole.hexdigest()[:16]


def grid(
    setpoints: list[float], corpora: list[str], seeds: int, controller: str, settings: list[str]
) -> list[TrackingCell]:
    """Every combination, and at the middle setpoints each disturbance that there can be.

    In the order of doing, so that a part of it is balanced: of each seed first the half in which every two of rate,
    rank and corpus occur together once, then the disturbances, then the other half.
    """
    common = {"controller": controller, "settings": tuple(settings)}
    cells = []
    for seed in range(seeds):
        halves: tuple[list[TrackingCell], list[TrackingCell]] = ([], [])
        for (i, rate), (j, rank), (k, corpus) in product(enumerate(RATES), enumerate(RANKS), enumerate(corpora)):
            halves[(i + j + k) % 2].extend(TrackingCell(s, rate, rank, corpus, seed, **common) for s in setpoints)
        disturbed = [
            TrackingCell(s, 6e-4, 16, corpora[0], seed, d, **common)
            for s, d in product(_middle(setpoints), DISTURBANCES)
            if moved(s, d) < 1
        ]
        cells += halves[1] + disturbed + halves[0]
    return cells


def _middle(setpoints: list[float]) -> list[float]:
    return setpoints[1:-1] or setpoints


def moved(setpoint: float, disturbance: str | None) -> float:
    """Where a disturbance moves the setpoint to: above 1, where no S can be, from two thirds on."""
    return setpoint * {"S* x1.5": 1.5, "S* /1.5": 1 / 1.5}.get(disturbance or "", 1.0)


def left_out(setpoints: list[float]) -> list[str]:
    """What ``grid`` leaves out for want of a setpoint to move to, in words."""
    return [
        f"{d} is left out at S* = {s:g}: {moved(s, d):.4g} is no setpoint, it must be below 1"
        for s, d in product(_middle(setpoints), DISTURBANCES)
        if moved(s, d) >= 1
    ]


def quick(setpoints: list[float], corpora: list[str], controller: str, settings: list[str]) -> list[TrackingCell]:
    """Few cells across the grid, and one disturbance; half the steps at the double rate, so S comes as far."""
    common = {"controller": controller, "settings": tuple(settings), "steps": STEPS // 2}
    low, high, middle = setpoints[0], setpoints[-1], setpoints[len(setpoints) // 2]
    lower = setpoints[len(setpoints) // 3]
    return [
        TrackingCell(low, 2 * RATES[0], 16, corpora[0], 0, **common),
        TrackingCell(high, RATES[1], 8, corpora[-1], 0, **common),
        TrackingCell(lower, RATES[1], 8, corpora[0], 1, **common),
        TrackingCell(middle, 2 * RATES[0], 16, corpora[0], 0, DISTURBANCES[0], **common),
    ]
