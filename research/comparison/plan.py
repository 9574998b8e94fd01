"""From cells of the protocol to runs: what can be done now, and what it waits for."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

from research.comparison.evidence import Evidence, Spec
from research.comparison.protocol import AUTO, CASCADE, PI, Arm, Protocol, Task
from research.comparison.record import BASE
from research.laws import LAWS

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A place in the protocol. With a ``rate`` it is a run that tunes the learning rate."""

    task: Task
    arm: Arm
    seed: int
    rate: float | None = None


def _known(answer: Callable[..., T]) -> Callable[..., T]:
    """A method of the plan, worked out once for each state of the evidence: it is asked the same for every cell."""

    @wraps(answer)
    def known(plan: "Plan", *question: Any) -> T:
        if plan.known_of != plan.evidence.additions:
            plan.known, plan.known_of = {}, plan.evidence.additions
        if (answer, question) not in plan.known:
            plan.known[answer, question] = answer(plan, *question)
        return plan.known[answer, question]

    return known


class Plan:
    """The part of a protocol that was asked for, and the evidence for it.

    Args:
        protocol: all of it.
        tasks: names of the tasks asked for.
        arms: names of the arms asked for.
        seeds: how many of the seeds.
        evidence: what is finished, in the precision that all runs of the plan are in; what follows from it is worked
            out again when there is more of it.
    """

    def __init__(
        self, protocol: Protocol, evidence: Evidence, tasks: list[str] | None = None, arms: list[str] | None = None,
        seeds: int | None = None,
    ) -> None:  # fmt: skip
        self.protocol, self.evidence = protocol, evidence
        self.tasks = [task for task in protocol.tasks if tasks is None or task.name in tasks]
        self.arms = [
            arm
            for arm in protocol.arms
            if (arms is None or arm.name in arms) and arm.settings["control.controller"] in LAWS
        ]
        self.seeds = protocol.seeds[:seeds]
        self.known: dict[Any, Any] = {}
        self.known_of = evidence.additions

    def cells(self) -> list[Cell]:
        """What was asked for, in the order of doing: headline before the rest, the first seeds before the others, and
        every task in turn, so that an interrupted comparison is balanced."""
        first = self.protocol.seeds[: self.protocol.first_seeds]

        def tier(cell: Cell) -> tuple[bool, bool, int]:
            return cell.seed not in first, cell.arm.name not in self.protocol.headline, cell.seed

        cells = [Cell(task, arm, seed) for seed in self.seeds for arm in self.arms for task in self.tasks]
        return sorted(cells, key=tier)

    @_known
    def everything(self) -> list[Cell]:
        """The cells asked for and all they need, needs first, each once."""
        found: dict[Cell, None] = {}

        def visit(cell: Cell) -> None:
            if cell not in found:
                for need in self._needs(cell):
                    visit(need)
                found[cell] = None

        for cell in self.cells():
            visit(cell)
        return list(found)

    def next(self, passed_over: Callable[[Spec], bool] = lambda spec: False) -> Spec | None:
        """The first run whose needs are finished and that is neither finished itself nor passed over."""
        return next((spec for spec in self.open_runs() if not passed_over(spec)), None)

    def open_runs(self) -> Iterator[Spec]:
        """Those that could be done now; one may come several times."""
        return (spec for spec in self.specs() if spec and self.evidence.get(spec) is None)

    def unfinished_arms(self) -> list[tuple[str, str, int]]:
        """Task, arm and how many of its seeds have no finished run, for every arm that lacks any."""
        unfinished = Counter((c.task.name, c.arm.label) for c in self.cells() if self.record(c) is None)
        return [(task, arm, count) for (task, arm), count in unfinished.items()]

    def record(self, cell: Cell) -> dict | None:
        """The finished run of a cell."""
        spec = self.spec(cell)
        return self.evidence.get(spec) if spec else None

    def specs(self) -> list[Spec | None]:
        """Every run, tuning and base model included; None for those that wait for runs that are not finished."""
        return [self.base(task) for task in self.tasks] + [self.spec(cell) for cell in self.everything()]

    @_known
    def spec(self, cell: Cell) -> Spec | None:
        """The run of a cell; None while it waits for runs that are not finished, or if that which it takes lambda from
        has failed."""
        if not all(map(self.record, self._needs(cell))):
            return None
        arm, settings = cell.arm, dict(cell.arm.settings)
        settings["optimizer.learning_rate"] = cell.rate or self.learning_rate(cell.task, arm)
        if arm.at_chosen:
            settings["control.target_s"] = self.setpoint()
        if arm.derive == "pi-start":
            start = LAWS["pi"](setpoint=self.setpoint()).lambda_start
            settings["control.lambda_init"] = _rounded(start)
        elif arm.derive:
            source = self.record(self._source(cell))
            if source["failed"]:
                return None
            if arm.derive.endswith("-mean"):
                settings["control.lambda_init"] = mean_strength(source)
            else:
                settings["control.replay"] = source["key"]
        settings |= cell.task.settings
        return Spec(cell.task, arm.name, arm.setting, cell.seed, settings, self.evidence.precision)

    def base(self, task: Task) -> Spec:
        """The run that trains nothing: the base model's score on a task's texts."""
        settings = {"control.controller": "none", **task.settings}
        return Spec(replace(task, name=BASE, steps=0), task.name, "", 0, settings, self.evidence.precision)

    @_known
    def learning_rate(self, task: Task, arm: Arm) -> float | None:
        """The rate at which the family's representative had the best validation, of the adapter that counts for it;
        None until all are tried."""
        rates = self.protocol.rates
        if len(rates) == 1:
            return rates[0]
        records = list(map(self.record, self._tuning(task, arm)))
        if not all(records):
            return None
        scores = [_validation(record, self.protocol.tuned[arm.family].adapter) for record in records]
        return rates[scores.index(min(scores))]

    @_known
    def setpoint(self) -> float | None:
        """S*: of PI's setpoints the one whose validation at the end is best over the first seeds of one task; None
        until all are tried."""
        scores = defaultdict(list)
        for cell in self._selection():
            if (record := self.record(cell)) is None:
                return None
            scores[cell.arm].append(_validation(record, "final"))
        best = min(scores, key=lambda arm: statistics.fmean(scores[arm]))
        return float(best.settings["control.target_s"])

    def _needs(self, cell: Cell) -> list[Cell]:
        needs = []
        if cell.rate is None and len(self.protocol.rates) > 1:
            needs += self._tuning(cell.task, cell.arm)
        if cell.arm.at_chosen or cell.arm.derive.startswith("pi"):
            needs += self._selection()
        if cell.arm.derive.endswith(("-mean", "-replay")):
            needs.append(self._source(cell))
        return needs

    def _tuning(self, task: Task, arm: Arm) -> list[Cell]:
        representative = self.protocol.tuned[arm.family]
        return [Cell(task, representative, self.protocol.seeds[0], rate) for rate in self.protocol.rates]

    def _selection(self) -> list[Cell]:
        seeds = self.protocol.seeds[: self.protocol.first_seeds]
        return [Cell(self.protocol.selection, arm, seed) for seed in seeds for arm in self.protocol.swept_pi]

    @staticmethod
    def source_of(arm: Arm) -> Arm | None:
        """The law whose runs an arm takes lambda from; None where it needs none."""
        law, _, what = arm.derive.partition("-")
        return {"pi": PI, "cascade": CASCADE, "auto": AUTO}[law] if what in ("mean", "replay") else None

    def _source(self, cell: Cell) -> Cell:
        """The run that a cell takes lambda from."""
        arm = self.source_of(cell.arm)
        assert arm is not None, "this arm sets its own lambda"
        return Cell(cell.task, arm, cell.seed if cell.arm.derive.endswith("-mean") else self._other_seed(cell.seed))

    def _other_seed(self, seed: int) -> int:
        """The next one among the first seeds, or among the later ones, so that a balanced part can be finished."""
        seeds, first = self.protocol.seeds, self.protocol.first_seeds
        group = seeds[:first] if seed in seeds[:first] else seeds[first:]
        group = group if len(group) > 1 else seeds
        return group[(group.index(seed) + 1) % len(group)]


def mean_strength(record: dict) -> float:
    """The time average of a run's lambda, to four digits: over the ticks, each weighted by the steps it held for."""
    steps, lams = [0, *record["ticks"]["step"]], record["ticks"]["lambda"]
    start = record["law"]["lambda_init"]
    held = zip([start, *lams[:-1]], steps[:-1], steps[1:], strict=True)
    return _rounded(sum(lam * (stop - begin) for lam, begin, stop in held) / steps[-1])


def _rounded(value: float) -> float:
    """To four digits, so that a key does not depend on the last bit of a machine's arithmetic."""
    return float(f"{value:.4g}")


def _validation(record: dict, which: str) -> float:
    """A run's validation; infinite for a run that failed, so that it is never chosen."""
    return float("inf") if record["failed"] else record["validation"][which]
