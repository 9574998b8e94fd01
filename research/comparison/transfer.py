"""Which quantity, held at one value, would have chosen well on every task? Read off the sweep; nothing is trained.

A sweep of lambda traces a curve on each task: what a quantity ended at, and what the adapter then cost on test text.
A quantity is worth holding at one value if the value that is best on one task is near the best on the others, whatever
the corpus and the number of tokens. So its value is taken where the selection task's validation is best, and looked
up on the curves of the others. This asks of S, and of its rivals, what a perfect controller could reach with it.

One task's choice may be a lucky or an unlucky one. So the value is chosen a second time, on all tasks but those of one
corpus, and looked up on these; each corpus takes its turn. That is what a default can be expected to cost on new text.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from research.comparison.plan import Cell, Plan
from research.comparison.protocol import NONE_AT_RATE
from research.comparison.rows import mean_of_known, scores_of

LAST_TICKS = 5
"""Ticks at the end that a run's quantities are averaged over."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Where the runs of a task's sweep ended, each array (settings, seeds): the settings in the order of lambda, 0
    first. In bits per token where not said otherwise.

    Attributes:
        lam: lambda.
        s: S, a ratio.
        train: DataBPT.
        validation: on the validation text.
        base_train, base_validation: of the base model on the training text and there.
        test: on the test text.
        n_tokens: N.
    """

    lam: np.ndarray
    s: np.ndarray
    train: np.ndarray
    validation: np.ndarray
    base_train: np.ndarray
    base_validation: np.ndarray
    test: np.ndarray
    n_tokens: np.ndarray

    @property
    def param(self) -> np.ndarray:
        """ParamBPT, from S = P / (D + P)."""
        return self.train * self.s / (1 - self.s)

    @property
    def saved(self) -> np.ndarray:
        """Bits that the adapter saves on its training text."""
        return np.maximum(self.base_train - self.train, 1e-3)

    @property
    def carry_over(self) -> np.ndarray:
        """Bits saved on validation text for each saved on training text."""
        return (self.base_validation - self.validation) / self.saved

    def under(self, factor: float) -> "Curve":
        """The same runs where sigma^2 is ``factor`` times as large."""
        param = self.param / factor
        return replace(self, lam=self.lam * factor, s=param / (self.train + param))


QUANTITIES: dict[str, Callable[[Curve], np.ndarray]] = {
    "λ": lambda runs: runs.lam,
    "S": lambda runs: runs.s,
    "S / S at λ = 0": lambda runs: runs.s / runs.s[0],
    "ParamBPT": lambda runs: runs.param,
    "ParamBPT · N (norm of the update)": lambda runs: runs.param * runs.n_tokens,
    "ParamBPT / that at λ = 0": lambda runs: runs.param / runs.param[0],
    "ParamBPT per bit saved": lambda runs: runs.param / runs.saved,
    "validation minus training": lambda runs: runs.validation - runs.train,
    "carry-over": lambda runs: runs.carry_over,
    "carry-over / that at the largest λ": lambda runs: runs.carry_over / runs.carry_over[-1],
}
"""What could be held. The carry-over is what is saved on validation text for a bit saved on training text."""

THEORY = ("carry-over / that at the largest λ", 0.5)
"""If held-out savings V are a parabola in those on training text, V = a T - c T^2, they are largest at T = a / 2c,
where the carry-over V / T is half of a, a small adapter's."""


CONSTANTS: dict[str, tuple[float, ...]] = {
    "λ": (0.01, 0.03, 0.1, 0.3, 1.0),
    "S": (0.02, 0.1, 0.2, 0.3, 0.45, 0.6, 0.7, 0.8),
    "S / S at λ = 0": (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0),
}
"""What a default could be: one value for all that anyone may bring."""

PRIORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors on sigma."""

CARRIED = (("S / S at λ = 0", 0.7), ("λ", 0.03), ("S", 0.45))
"""What is carried to another sigma: a share of the S without lambda, one lambda, and the S* chosen here."""


def constants(plan: Plan) -> list[dict[str, Any]]:
    """What each value of ``CONSTANTS`` would cost, held on every task whose sweep is there. Empty without any."""
    curves = _curves(plan)
    return [_judge(name, value, curves) for name, values in CONSTANTS.items() for value in values if curves]


def priors(plan: Plan) -> list[dict[str, Any]]:
    """What the values of ``CARRIED`` would cost where sigma is another, ``times`` that of the runs.

    No run is needed for it. Lambda acts as lambda / (sigma^2 N), so a run is one with k^2 times its lambda where sigma
    is k times as large, and there it ends at the same weights, at 1 / k^2 of its ParamBPT: the sweep is a sweep there
    too, of other lambdas. The same holds of an N that is k^2 times as large on the same text. Between lambda = 0 and
    the smallest of the sweep the lookup is a straight line.
    """
    curves = _curves(plan)
    return [
        _judge(name, value, scaled) | {"times": factor}
        for name, value in CARRIED
        for factor in PRIORS
        if (scaled := {task: curve.under(factor**2) for task, curve in curves.items()})
    ]


def transfer(plan: Plan) -> list[dict[str, Any]]:
    """For each quantity its value on the selection task, and the excess over the swept best elsewhere; beside it the
    excess of a value chosen on the other corpora. Last, the value that theory gives, and the excess everywhere.

    Empty until the sweep of the selection task and of another task is there for a common seed.
    """
    tasks = {task.name: task for task in plan.protocol.tasks}
    curves = _curves(plan)
    others = {name: curve for name, curve in curves.items() if name != plan.protocol.selection_task}
    selection = curves.get(plan.protocol.selection_task or "")
    if selection is None or not others:
        return []
    corpora = {name: tasks[name].scored_on for name in curves}
    chosen = [(name, float(_values(name, selection)[_best(selection)])) for name in QUANTITIES]
    rows = [_judge(*row, others) | _carry_over_corpora(row[0], curves, corpora) for row in chosen]
    return [*rows, _judge(*THEORY, curves) | {"of_other_corpora": {}, "carried_excess": {}}]


def _curves(plan: Plan) -> dict[str, Curve]:
    """By task, where there is one: the sweep, every lambda at the rate of the fixed ones, 0 too, so that it is a curve
    in lambda and nothing else. Of the seeds whose runs all have a place on it.
    """
    arms = [NONE_AT_RATE, *(arm for arm in plan.protocol.arms if arm.name == "fixed")]
    curves: dict[str, Curve] = {}
    for task in plan.protocol.tasks:
        if base := plan.evidence.get(plan.base(task)):
            of_seeds = [[_place(plan.record(Cell(task, arm, seed)), base) for arm in arms] for seed in plan.seeds]
            if whole := [places for places in of_seeds if all(places)]:
                curves[task.name] = Curve(*np.array(whole).T)
    return curves


def _place(record: dict[str, Any] | None, base: dict[str, Any]) -> tuple[float, ...] | None:
    """Of a finished run, as ``Curve`` has it; None of one that failed, or had nothing to measure S by at its end."""
    if record is None or record["failed"]:
        return None
    s, train = (mean_of_known(record["ticks"][name][-LAST_TICKS:]) for name in ("s", "data_bpt"))
    if s is None or train is None or not 0 < s < 1:
        return None
    lam, validation = record["settings"].get("control.lambda_init", 0.0), record["validation"]["final"]
    of_base = base["training"]["final"], base["validation"]["final"]
    return lam, s, train, validation, *of_base, scores_of([record]).bits_per_token.item(), record["n_tokens"]


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


def _carry_over_corpora(name: str, curves: dict[str, Curve], corpora: dict[str, str]) -> dict[str, Any]:
    """The value that is best on the tasks of the other corpora, for each corpus, and its excess on that corpus's tasks.

    Best is the least validation, relative to each task's own least and averaged over tasks, among the values that the
    sweeps had. Empty where there is one corpus.
    """
    chosen, excess = {}, {}
    for corpus in sorted(set(corpora.values())):
        others = [curve for task, curve in curves.items() if corpora[task] != corpus]
        if not others:
            break
        candidates = np.unique(np.concatenate([_values(name, curve) for curve in others]))
        costs = [np.mean([_excess(name, value, curve, "validation") for curve in others]) for value in candidates]
        chosen[corpus] = float(candidates[int(np.argmin(costs))])
        own = {task: curve for task, curve in curves.items() if corpora[task] == corpus}
        excess |= {task: _excess(name, chosen[corpus], curve) for task, curve in own.items()}
    return {"of_other_corpora": chosen, "carried_excess": excess}


def _values(name: str, curve: Curve) -> np.ndarray:
    """The quantity at each setting, averaged over seeds."""
    return QUANTITIES[name](curve).mean(axis=1)


def _best(curve: Curve) -> int:
    """The setting with the best validation."""
    return int(np.argmin(_bits(curve, "validation")))


def _bits(curve: Curve, text: Literal["validation", "test"]) -> np.ndarray:
    """Bits per token on a text at each setting, averaged over seeds."""
    return getattr(curve, text).mean(axis=1)


def _excess(name: str, value: float, curve: Curve, text: Literal["validation", "test"] = "test") -> float:
    """Bits on the text where the quantity has the value, over those of the swept best, minus 1.

    Linear between neighbouring settings; beyond the ends, the end: a controller rests at a bound there.
    """
    values, bits = _values(name, curve), _bits(curve, text)
    order = np.argsort(values)
    return float(np.interp(value, values[order], bits[order]) / bits[_best(curve)] - 1)
