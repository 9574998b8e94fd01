"""From cells of the protocol to runs: what can be done now, and what it waits for."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from granite_scu.control import CONTROLLERS
from granite_scu.experiments.comparison.evidence import Evidence, Spec
from granite_scu.experiments.comparison.protocol import CASCADE, PI, Arm, Protocol, Task
from granite_scu.experiments.comparison.record import BASE

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Cell:
    """A place in the protocol. With a ``rate`` it is a run that tunes the learning rate."""

    task: Task
    arm: Arm
    seed: int
    rate: float | None = None

    @property
    def place(self) -> tuple:
        """Equal for equal cells."""
        return self.task.name, self.arm.label, self.seed, self.rate


class Missing(Exception):
    """Runs that must be finished before a cell's settings are known."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        super().__init__()
        self.cells = list(cells)


class Plan:
    """The part of a protocol that was asked for, and the evidence for it.

    Args:
        protocol: the whole of it.
        tasks: names of the tasks asked for.
        arms: names of the arms asked for.
        seeds: how many of the seeds.
        evidence: what is finished, in the precision that all runs of the plan are in; what follows from it is worked
            out anew when there is more of it.
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
            if (arms is None or arm.name in arms) and arm.settings["control.controller"] in CONTROLLERS
        ]
        self.seeds = protocol.seeds[:seeds]
        self._known: dict[Any, Any] = {}
        self._known_of = evidence.additions

    def _once(self, question: Any, answer: Callable[[], T]) -> T:
        """The answer, worked out once for each state of the evidence: a plan asks the same thing for every cell."""
        if self._known_of != self.evidence.additions:
            self._known, self._known_of = {}, self.evidence.additions
        if question not in self._known:
            self._known[question] = answer()
        return self._known[question]

    def cells(self) -> list[Cell]:
        """What was asked for, in the order of doing: headline before the rest, the first seeds before the others, and
        every task in turn, so that an interrupted comparison is balanced."""
        first = self.protocol.seeds[: self.protocol.first_seeds]

        def tier(cell: Cell) -> tuple[bool, bool, int]:
            return cell.seed not in first, cell.arm.name not in self.protocol.headline, cell.seed

        cells = [Cell(task, arm, seed) for seed in self.seeds for arm in self.arms for task in self.tasks]
        return sorted(cells, key=tier)

    def everything(self) -> list[Cell]:
        """The cells asked for and all they need, needs first, each once."""
        return self._once("everything", self._everything)

    def _everything(self) -> list[Cell]:
        found: dict[tuple, Cell] = {}

        def visit(cell: Cell) -> None:
            if cell.place in found:
                return
            for need in self._needs(cell):
                visit(need)
            found[cell.place] = cell

        for cell in self.cells():
            visit(cell)
        return list(found.values())

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

    def spec_if_known(self, cell: Cell) -> Spec | None:
        try:
            return self.spec(cell)
        except Missing:
            return None

    def record(self, cell: Cell) -> dict | None:
        """The finished run of a cell."""
        spec = self.spec_if_known(cell)
        return self.evidence.get(spec) if spec else None

    def specs(self) -> list[Spec | None]:
        """Every run, tuning and base model included; None for those that hang on runs that are not finished."""
        return [self.base(task) for task in self.tasks] + [self.spec_if_known(cell) for cell in self.everything()]

    def spec(self, cell: Cell) -> Spec:
        """The run of a cell.

        Raises:
            Missing: it hangs on runs that are not finished.
        """
        return self._once(("spec", cell.place), lambda: self._spec(cell))

    def _spec(self, cell: Cell) -> Spec:
        arm = cell.arm
        settings: dict[str, Any] = dict(arm.settings)
        settings["optimizer.learning_rate"] = cell.rate or self.learning_rate(cell.task, arm)
        if arm.at_chosen:
            settings["control.target_s"] = self.setpoint()
        if arm.derive == "pi-start":
            start = CONTROLLERS["pi"](setpoint=self.setpoint()).initial_strength
            settings["control.lambda_init"] = _rounded(start)
        if arm.derive.endswith("-mean"):
            settings["control.lambda_init"] = mean_strength(self._source(cell))
        if arm.derive.endswith("-replay"):
            settings["control.replay"] = self._source(cell)["key"]
        settings |= cell.task.settings
        return Spec(cell.task, arm.name, arm.setting, cell.seed, settings, self.evidence.precision)

    def base(self, task: Task) -> Spec:
        """The run that trains nothing: the base model's score on a task's texts."""
        settings = {"control.controller": "none", **task.settings}
        return Spec(replace(task, name=BASE, steps=0), task.name, "", 0, settings, self.evidence.precision)

    def learning_rate(self, task: Task, arm: Arm) -> float:
        """The rate at which the family's representative had the best validation, of the adapter that counts for it."""
        return self._once(("rate", task.name, arm.family), lambda: self._learning_rate(task, arm))

    def _learning_rate(self, task: Task, arm: Arm) -> float:
        rates = self.protocol.rates
        if len(rates) == 1:
            return rates[0]
        records = self._finished(self._tuning(task, arm))
        scores = [_validation(record, self.protocol.tuned[arm.family].adapter) for record in records]
        return rates[scores.index(min(scores))]

    def setpoint(self) -> float:
        """S*: of PI's setpoints the one whose validation at the end is best over the first seeds of one task."""
        return self._once("setpoint", self._setpoint)

    def _setpoint(self) -> float:
        arms = self.protocol.swept_pi
        cells = self._selection()
        scores = defaultdict(list)
        for cell, record in zip(cells, self._finished(cells), strict=True):
            scores[cell.arm.label].append(_validation(record, "final"))
        best = min(arms, key=lambda arm: statistics.fmean(scores[arm.label]))
        return float(best.settings["control.target_s"])

    def _needs(self, cell: Cell) -> list[Cell]:
        needs = []
        if cell.rate is None and len(self.protocol.rates) > 1:
            needs += self._tuning(cell.task, cell.arm)
        if cell.arm.at_chosen or cell.arm.derive.startswith("pi"):
            needs += self._selection()
        if cell.arm.derive.endswith(("-mean", "-replay")):
            needs.append(self._source_cell(cell))
        return needs

    def _tuning(self, task: Task, arm: Arm) -> list[Cell]:
        representative = self.protocol.tuned[arm.family]
        return [Cell(task, representative, self.protocol.seeds[0], rate) for rate in self.protocol.rates]

    def _selection(self) -> list[Cell]:
        seeds = self.protocol.seeds[: self.protocol.first_seeds]
        return [Cell(self.protocol.selection, arm, seed) for seed in seeds for arm in self.protocol.swept_pi]

    def _source_cell(self, cell: Cell) -> Cell:
        """The run that a cell takes lambda from."""
        law, _, what = cell.arm.derive.partition("-")
        return Cell(
            cell.task, {"pi": PI, "cascade": CASCADE}[law], cell.seed if what == "mean" else self._other_seed(cell.seed)
        )

    def _source(self, cell: Cell) -> dict:
        """What a cell takes lambda from; one that failed has none to give, and the cell is never done."""
        source = self._finished([self._source_cell(cell)])[0]
        if source["failed"]:
            raise Missing([])
        return source

    def _other_seed(self, seed: int) -> int:
        """The next one among the first seeds, or among the later ones, so that a balanced part can be finished."""
        seeds, first = self.protocol.seeds, self.protocol.first_seeds
        group = seeds[:first] if seed in seeds[:first] else seeds[first:]
        group = group if len(group) > 1 else seeds
        return group[(group.index(seed) + 1) % len(group)]

    def _finished(self, cells: list[Cell]) -> list[dict]:
        records = [(cell, self.evidence.get(self.spec(cell))) for cell in cells]
        if missing := [cell for cell, record in records if record is None]:
            raise Missing(missing)
        return [record for _, record in records if record is not None]


def mean_strength(record: dict) -> float:
    """The time average of a run's lambda, to four digits: over the ticks, each weighted by the steps it held for."""
    steps, strengths = [0, *record["ticks"]["step"]], record["ticks"]["lambda"]
    start = record["law"]["lambda_init"]
    held = zip([start, *strengths[:-1]], steps[:-1], steps[1:], strict=True)
    return _rounded(sum(strength * (stop - begin) for strength, begin, stop in held) / steps[-1])


def _rounded(value: float) -> float:
    """To four digits, so that a key does not hang on the last bit of a machine's arithmetic."""
    return float(f"{value:.4g}")


def _validation(record: dict, which: str) -> float:
    """A run's validation; infinite for a run that failed, so that it is never chosen."""
    return float("inf") if record["failed"] else record["validation"][which]
