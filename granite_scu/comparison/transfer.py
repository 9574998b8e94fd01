"""Which quantity, held at one value, would have chosen well on every task? Read off the sweep; nothing is trained.

A sweep of lambda traces a curve on each task: what a quantity ended at, and what the adapter then cost on test text.
A quantity is worth holding at one value if the value that is best on one task is near the best on the others, whatever
the corpus and the number of tokens. So its value is taken where the selection task's validation is best, and looked
up on the curves of the others. This asks of S, and of its rivals, what a perfect controller could reach with it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from granite_scu.comparison.plan import Cell, Missing, Plan, base_spec
from granite_scu.comparison.protocol import Task

LAST_TICKS = 5
"""Ticks at the end that a run's quantities are averaged over."""


@dataclass(frozen=True)
class Place:
    """Where a run of the sweep ended, in bits per token where not said otherwise.

    Attributes:
        strength: lambda.
        s: S, a ratio.
        train: DataBPT.
        validation: on the validation text.
        base_train, base_validation: of the base model on the training text and there.
        test: on the test text.
        n_tokens: N.
    """

    strength: float
    s: float
    train: float
    validation: float
    base_train: float
    base_validation: float
    test: float
    n_tokens: int

    @property
    def param(self) -> float:
        """ParamBPT, from S = P / (D + P)."""
        return self.train * self.s / (1 - self.s)

    @property
    def saved(self) -> float:
        """Bits that the adapter saves on its training text."""
        return max(self.base_train - self.train, 1e-3)

    @property
    def carry_over(self) -> float:
        """Bits saved on validation text for each saved on training text."""
        return (self.base_validation - self.validation) / self.saved


@dataclass(frozen=True)
class Ends:
    """The ends of a sweep on one task and seed: lambda = 0, and the largest."""

    free: Place
    strongest: Place


QUANTITIES: dict[str, Callable[[Place, Ends], float]] = {
    "λ": lambda place, _: place.strength,
    "S": lambda place, _: place.s,
    "S / S at λ = 0": lambda place, ends: place.s / ends.free.s,
    "ParamBPT": lambda place, _: place.param,
    "ParamBPT · N (norm of the update)": lambda place, _: place.param * place.n_tokens,
    "ParamBPT per bit saved": lambda place, _: place.param / place.saved,
    "validation minus training": lambda place, _: place.validation - place.train,
    "carry-over": lambda place, _: place.carry_over,
    "carry-over / that at the largest λ": lambda place, ends: place.carry_over / ends.strongest.carry_over,
}
"""What could be held. The carry-over is what is saved on validation text for a bit saved on training text."""

THEORY = ("carry-over / that at the largest λ", 0.5)
"""If held-out savings V are a parabola in those on training text, V = a T - c T^2, they are largest at T = a / 2c,
where the carry-over V / T is half of a, a small adapter's."""


def transfer(plan: Plan) -> list[dict[str, Any]]:
    """For each quantity its value on the selection task, and the excess over the swept best elsewhere; last, the value
    that theory gives, and the excess everywhere.

    Empty until the sweep of the selection task and of another task is there for a common seed.
    """
    curves = {task.name: curve for task in plan.protocol.tasks if (curve := _curve(plan, task))}
    selection = curves.pop(plan.protocol.selection_task, None)
    if selection is None or not curves:
        return []
    chosen = [(name, float(_values(name, selection)[_best(selection)]), curves) for name in QUANTITIES]
    name, value = THEORY
    by_theory = (name, value, {plan.protocol.selection_task: selection, **curves})
    return [_judge(*row) for row in (*chosen, by_theory)]


Curve = list[list[Place]]
"""Settings in the order of lambda, 0 first; of each its runs, a seed each."""


def _curve(plan: Plan, task: Task) -> Curve | None:
    """The sweep, every lambda at the rate of the fixed ones, 0 too: a curve in lambda and nothing else."""
    arms = plan.protocol.arms
    fixed, none = [arm for arm in arms if arm.name == "fixed"], next(arm for arm in arms if arm.name == "none")
    try:
        rate = plan.learning_rate(task, fixed[0])
    except Missing:
        return None
    of_seeds = [[Cell(task, none, seed, rate), *(Cell(task, arm, seed) for arm in fixed)] for seed in plan.seeds]
    records = [[plan.record(cell) for cell in cells] for cells in of_seeds]
    whole = [runs for runs in records if all(run and not run["failed"] for run in runs)]
    base = plan.evidence.get(base_spec(task))
    if not whole or base is None:
        return None
    return [[_place(run, base) for run in runs if run] for runs in zip(*whole, strict=True)]


def _place(record: dict[str, Any], base: dict[str, Any]) -> Place:
    ticks, test = record["ticks"], record["test"]
    return Place(
        strength=record["settings"].get("control.lambda_init", 0.0),
        s=float(np.mean(ticks["s"][-LAST_TICKS:])),
        train=float(np.mean(ticks["data_bpt"][-LAST_TICKS:])),
        validation=record["validation"]["final"],
        base_train=base["training"]["final"],
        base_validation=base["validation"]["final"],
        test=sum(test["final"]) / sum(test["tokens"]) / math.log(2),
        n_tokens=record["n_tokens"],
    )


def _judge(name: str, value: float, curves: dict[str, Curve]) -> dict[str, Any]:
    excess = {task: _excess(name, value, curve) for task, curve in curves.items()}
    values = {task: float(_values(name, curve)[_best(curve)]) for task, curve in curves.items()}
    return {
        "quantity": name,
        "value": value,
        "best": values,
        "excess": excess,
        "mean_excess": float(np.mean(list(excess.values()))),
        "worst_excess": max(excess.values()),
    }


def _values(name: str, curve: Curve) -> np.ndarray:
    """The quantity at each setting, averaged over seeds."""
    quantity = QUANTITIES[name]
    ends = [Ends(free, strongest) for free, strongest in zip(curve[0], curve[-1], strict=True)]
    return np.array([np.mean([quantity(*pair) for pair in zip(runs, ends, strict=True)]) for runs in curve])


def _best(curve: Curve) -> int:
    """The setting with the best validation."""
    return int(np.argmin([np.mean([place.validation for place in runs]) for runs in curve]))


def _excess(name: str, value: float, curve: Curve) -> float:
    """Test bits where the quantity has the value, over those of the swept best, minus 1.

    Linear between neighbouring settings; beyond the ends, the end: a controller rests at a bound there.
    """
    values, test = _values(name, curve), np.array([np.mean([place.test for place in runs]) for runs in curve])
    order = np.argsort(values)
    return float(np.interp(value, values[order], test[order]) / test[_best(curve)] - 1)
