"""The cells of ``benchmarks/learning_rates.py``, those that tell most first."""

import math
from dataclasses import dataclass
from typing import Any

RECORDS_A_STEP = 8

RATES = (1e-3, 3e-4, 3e-3, 1e-4, 3e-5)
"""The likeliest first."""


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        model: ``smollm2`` or ``tiny-granite-h``.
        data: a kind of ``learning_rates_data``.
        records: trained on.
        rate: peak learning rate.
        epochs: passes over the records; below 1 it is a pilot on some of them.
        seed: of the run.
    """

    model: str
    data: str
    records: int
    rate: float
    epochs: float
    seed: int = 0

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Cell":
        """The cell that a line of the results is about."""
        return cls(**{name: line[name] for name in ("model", "data", "records", "rate", "epochs", "seed")})

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return math.ceil(self.epochs * self.records / RECORDS_A_STEP)

    def __str__(self) -> str:
        seed = f"seed {self.seed} " if self.seed else ""
        return f"{self.model} {self.data} {self.records} records {self.epochs:g} epochs {seed}rate {self.rate:g}"


def saved(line: dict[str, Any]) -> float:
    """The share of the base's bits on held-out text that the run has saved."""
    return float(1 - line["bits"] / line["bits_base"])


def lost(line: dict[str, Any]) -> float:
    """Bits a token that the base's own general answers cost more than at the base."""
    return float(line["general_bits"] - line["general_bits_base"])


def _cells(model: str, data: str, records: int, epochs: float, rates: tuple[float, ...] = RATES) -> list[Cell]:
    return [Cell(model, data, records, rate, epochs) for rate in rates]


_REAL, _HYBRID = "smollm2", "tiny-granite-h"

CELLS = [
    *_cells(_REAL, "facts", 100, 8, (1e-3, 3e-4, 3e-3)),
    *_cells(_HYBRID, "facts", 100, 8, (*RATES, 1e-2)),
    *_cells(_REAL, "facts", 30, 8, (1e-3, 3e-4)),
    *_cells(_REAL, "format", 100, 2, RATES[:3]),
    *_cells(_HYBRID, "facts", 100, 16, (1e-3, 3e-3)),
    *_cells(_HYBRID, "facts", 100, 4, (3e-3, 1e-2)),
    *_cells(_REAL, "facts", 100, 4, (3e-3,)),
    *_cells(_REAL, "facts", 100, 0.8, RATES[:3]),  # pilots, a tenth of the steps
    *_cells(_REAL, "style", 100, 2, RATES[:3]),
    *_cells(_REAL, "facts", 100, 16, (3e-4,)),
    *_cells(_REAL, "facts", 1000, 1, (1e-3,)),
    *_cells(_REAL, "style", 100, 0.2, RATES[:3]),  # pilots
    *_cells(_HYBRID, "facts", 1000, 3, (3e-3,)),
    *_cells(_HYBRID, "facts", 1000, 8, (3e-3,)),
    *_cells(_REAL, "text", 100, 2, (1e-3,)),
    *_cells(_HYBRID, "facts", 1000, 6, (3e-3,)),
    *_cells(_REAL, "text", 100, 2, (3e-4, 3e-3)),
    *(cell for data in ("style", "format", "text") for cell in _cells(_HYBRID, data, 100, 2, (3e-3, 1e-3, 1e-2))),
    *(Cell(_REAL, "facts", 100, rate, 8, seed=1) for rate in (1e-3, 3e-4)),
    *_cells(_REAL, "facts", 100, 8, (1e-4, 3e-5)),
    *(Cell(_REAL, data, 100, rate, 2) for data in ("format", "style", "text") for rate in (1e-4, 3e-5)),
    *_cells(_REAL, "facts", 30, 8, (3e-3,)),
    *_cells(_HYBRID, "facts", 5000, 1, (1e-3, 3e-3)),
    *_cells(_HYBRID, "facts", 5000, 4, (3e-3,)),
    *_cells(_HYBRID, "facts", 1000, 3, (1e-3, 1e-2)),
    *(Cell(_REAL, data, 100, 1e-3, 10) for data in ("format", "style")),  # the default's epochs
    *_cells(_HYBRID, "facts", 5000, 8, (3e-3,)),
    *_cells(_REAL, "facts", 1000, 3, (1e-3,)),
    *(cell for data in ("format", "style", "text") for cell in _cells(_HYBRID, data, 1000, 3, (3e-3, 1e-3, 3e-4))),
    *_cells(_REAL, "format", 1000, 1, (1e-3, 3e-4)),
    *_cells(_REAL, "style", 1000, 1, (1e-3, 3e-4)),
    *(Cell(_REAL, data, 30, rate, 4) for data in ("format", "style", "text") for rate in (1e-3, 3e-4)),
    *(Cell(_HYBRID, data, 30, rate, 8) for data in ("facts", "format", "style", "text") for rate in (3e-3, 1e-3, 1e-2)),
    *_cells(_REAL, "facts", 1000, 3, (3e-4,)),
    *_cells(_REAL, "facts", 5000, 1, (1e-3,)),
    *_cells(_REAL, "text", 1000, 1, (1e-3,)),
    *_cells(_REAL, "format", 100, 0.2, RATES[:3]),  # pilots
    *_cells(_REAL, "facts", 100, 4, (1e-3,)),
    *_cells(_REAL, "facts", 100, 2, (1e-3, 3e-3)),
    *_cells(_REAL, "format", 100, 4, (1e-3, 3e-4)),
    *_cells(_REAL, "facts", 1000, 1, (3e-4, 3e-3)),
    *_cells(_REAL, "facts", 1000, 3, (3e-3,)),
    *_cells(_REAL, "facts", 100, 16, (1e-3,)),
    *_cells(_REAL, "facts", 30, 16, (1e-3, 3e-4)),
    *_cells(_REAL, "facts", 30, 8, (1e-4, 3e-5)),
    *_cells(_REAL, "facts", 1000, 0.3, RATES[:3]),
    *_cells(_REAL, "text", 1000, 1, RATES[1:]),
    *_cells(_REAL, "format", 1000, 1, RATES[2:]),
    *_cells(_REAL, "style", 1000, 1, RATES[2:]),
    *_cells(_REAL, "facts", 5000, 1, RATES[1:]),
]
