"""Lines as finished runs would leave them."""

import math
from collections.abc import Callable
from dataclasses import asdict

import pytest

from research.real.grid import SCALED, Cell, Finished, Stage, to_do

DOCUMENTS, BASE = 12, 100.0
"""Of each text; and its nats under the base."""


@pytest.fixture(scope="session")
def line() -> Callable[..., dict]:
    """A run whose adapters validate at the distance of its rate from 1e-2, and score so many nats a document."""

    def make(cell: Cell, test: float = 50.0, others: float = 110.0, best: float = 1e-2, **more: float) -> dict:
        away = 1 + abs(math.log10(cell.rate / best))
        point = {
            "validation": away,
            "drift": 0.1,
            "nats": _nats(test, others),
            "right": [1, 0] * 6,
            "known": [1, 0],
        } | more
        names = ("end", "best", "mean", "ema", "step 9", *SCALED.values()) if cell.arm == "plain" else ("end", "best")
        at_base = {"nats": _nats(BASE, BASE), "right": [0] * 12, "known": [1, 1]}
        return asdict(cell) | {"points": dict.fromkeys(names, point), "at_base": at_base, "tokens": 1000,
                               "train_cpu_s": 10.0}  # fmt: skip

    return make


def _nats(test: float, others: float) -> dict[str, list[float]]:
    return {"test": [test] * DOCUMENTS} | {
        text: [others] * DOCUMENTS for text in ("general", "chats", "prose", "source")
    }


@pytest.fixture(scope="session")
def run_all(line) -> Callable[..., Finished]:
    """Every cell of a stage, one after the other, as the command would."""

    def make(stage: Stage, of: Callable[[Cell], dict] = lambda cell: {}) -> Finished:
        finished: Finished = {}
        while (cell := next(to_do(stage, finished), None)) is not None:
            finished[cell] = line(cell, **of(cell))
        return finished

    return make
