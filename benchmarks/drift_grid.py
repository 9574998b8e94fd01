"""The cells of ``benchmarks/drift.py``, those that tell most first."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.cells import REAL

RECORDS_A_STEP = 8
BUDGETS = (0.02, 0.05, 0.1, 0.01, 0.005)
LAMBDAS = (1.0, 10.0, 100.0, 0.1)
SETPOINTS = (0.1, 0.02, 0.3)
VALUED = {"loop": "{:.1%}", "ziegler": "{:.1%}", "fixed": "{:g}", "inputs": "{:g}", "size": "{:.0%}", "replay": "{:g}"}
"""How the value of an arm is told."""


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        base: ``smollm2``, ``tiny-granite-h`` or ``tiny-prose-dense``.
        data: a kind of ``learning_rates_data``.
        records: trained on.
        epochs: passes over the records.
        rate: peak learning rate.
        arm: ``plain``; ``loop`` holds a budget of drift, and ``ziegler`` by that law of research; ``fixed`` has a
            lambda times drift, and ``inputs`` one times drift on its own records (LwF); ``size`` holds a setpoint of
            S; ``replay`` trains on general text too.
        value: the budget, lambda, setpoint, or times the share of tokens that an anchor has.
        text: general text that the loop has: ``free`` or ``near``, see ``drift_training``.
        seed: of the run.
    """

    base: str
    data: str
    records: int
    epochs: float
    rate: float
    arm: str
    value: float = 0.0
    text: str = "free"
    seed: int = 0

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Cell":
        """The cell that a line of the results is about."""
        return cls(**{field.name: line[field.name] for field in fields(cls)})

    @property
    def way(self) -> str:
        """The arm with its value."""
        return f"{self.arm} {VALUED[self.arm].format(self.value)}" if self.arm in VALUED else self.arm

    def __str__(self) -> str:
        others = "".join(f"{name} {value} " for name, value, usual in
                         (("seed", self.seed, 0), ("text", self.text, "free")) if value != usual)  # fmt: skip
        setting = f"{self.base} {self.data} {self.records} records {self.epochs:g} epochs {others}rate {self.rate:g}"
        return f"{setting} {self.way}"


def saved(line: dict[str, Any], point: dict[str, Any]) -> float:
    """The share of the base's bits on held-out text of the lesson that a point has saved."""
    return float(1 - point["bits"] / line["at_base"]["bits"])


def more(line: dict[str, Any], point: dict[str, Any], what: str) -> float:
    """Bits a token that a point needs more than the base, of ``general``, ``prose``, ``source`` or ``chats``."""
    return float(point[what] - line["at_base"][what])


def _cells(
    settings: Sequence[tuple], rates: tuple[float, ...], *arms: tuple[str, tuple[float, ...]], seed: int = 0
) -> list[Cell]:
    """Of the real model's chats an anchor has text that is near, as a run writes it; other bases write plain text."""
    return [
        Cell(*setting, rate, arm, value, "near" if _has_near(setting) and arm in ("loop", "fixed") else "free", seed)
        for arm, values in arms
        for value in values
        for rate in rates
        for setting in settings
    ]


def _has_near(setting: tuple) -> bool:
    return bool(setting[0] == REAL and setting[1] not in ("text", "code"))


_SMALL = [
    (base, *lesson)
    for lesson in (("facts", 100, 8.0), ("text", 400, 2.0))
    for base in ("tiny-granite-h", "tiny-prose-dense")
]
_SMALL_CODE = [(base, "code", 400, 2.0) for base in ("tiny-granite-h", "tiny-prose-dense")]
_SMALL_RATES = (3e-3, 1e-3, 1e-2)
_FACTS, _OTHERS = (
    [(REAL, *lesson) for lesson in lessons]
    for lessons in (
        [("facts", 100, 8.0)],
        [("format", 100, 3.0), ("style", 100, 3.0), ("text", 200, 2.0), ("code", 200, 2.0)],
    )
)
_PLAIN, _REPLAY, _INPUTS = ("plain", (0.0,)), ("replay", (1.0,)), ("inputs", (1.0, 0.1))

CELLS = [
    *_cells(_SMALL, _SMALL_RATES, ("loop", BUDGETS[:1])),
    *_cells(_SMALL, _SMALL_RATES[:2], _PLAIN),
    *_cells(_FACTS, (1e-3,), _PLAIN, ("loop", BUDGETS[:2]), ("fixed", LAMBDAS[:1])),
    *(Cell(*setting, 1e-3, "loop", budget) for setting in _FACTS for budget in BUDGETS[:2]),  # free
    *_cells(_SMALL, _SMALL_RATES, ("loop", BUDGETS[1:])),
    *_cells(_SMALL, _SMALL_RATES, ("ziegler", BUDGETS[:1])),
    *_cells(_SMALL, _SMALL_RATES[2:], _PLAIN),
    *_cells(_FACTS, (3e-4, 3e-3), _PLAIN),
    *_cells(_FACTS, (1e-3,), ("loop", BUDGETS[2:3]), ("fixed", LAMBDAS[1:2]), _REPLAY, ("size", SETPOINTS[:1])),
    *_cells(_SMALL, _SMALL_RATES[:1], ("fixed", LAMBDAS), ("size", SETPOINTS), _REPLAY, _INPUTS),
    *_cells(_OTHERS, (1e-3,), _PLAIN, ("loop", BUDGETS[:2])),
    *_cells(_FACTS, (1e-3,), ("loop", BUDGETS[3:]), ("fixed", LAMBDAS[2:]), ("size", SETPOINTS[1:]), _INPUTS),
    *(cell for seed in (1, 2) for cell in _cells(_FACTS, (1e-3,), _PLAIN, ("loop", BUDGETS[:2]), seed=seed)),
    *(cell for seed in (1, 2) for cell in _cells(_SMALL, _SMALL_RATES[:1], _PLAIN, ("loop", BUDGETS[:3]), seed=seed)),
    *_cells(_FACTS, (3e-4, 3e-3), ("loop", BUDGETS[:3]), ("fixed", LAMBDAS[:2])),
    *_cells(_OTHERS, (3e-4, 3e-3), _PLAIN, ("loop", BUDGETS[:2])),
    *_cells(_OTHERS, (1e-3,), ("fixed", LAMBDAS[:2]), _REPLAY, ("size", SETPOINTS[:1])),
    *(
        cell
        for seed in (0, 1, 2)
        for cell in _cells(
            _SMALL_CODE, _SMALL_RATES[:1], _PLAIN, ("loop", BUDGETS[:2]), ("fixed", LAMBDAS[:1]), _REPLAY, seed=seed
        )
    ),
]
