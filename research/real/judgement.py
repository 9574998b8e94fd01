"""The protocol's hypotheses and criteria on the finished runs of a stage."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks import cells
from granite_scu.evaluation.statistics import LEVEL, Estimate
from research.real import grid
from research.real.evidence import (
    Difference,
    Judged,
    Of,
    count,
    difference,
    holm,
    kept,
    processor_seconds,
    reference,
    shared,
    so_far,
)
from research.real.grid import ARMS, SEEDS, Cell, Finished, Stage, best_kl, free_rival, scaled_rival

BUDGETS = sorted(ARMS["drift"])
DRIFT = [("drift", budget) for budget in BUDGETS]
AUTO, MIDDLE, WIDE = ("auto", 0.0), ("drift", 0.02), ("wide", 0.02)
RIVALS = {"F": free_rival, "F'": scaled_rival}
"""The free rivals of a loop."""
HYPOTHESES = 8
OF_F = {"H5", "H6", "H7"}
"""Those that compare with F."""
OF_ONE_SEED = {"H2", "H4", "H5", "H7"}
"""Those of a budget of 1 % or 5 %. Told, and never shown: over one seed a bootstrap has the chance of documents alone,
and finds a difference that is none in a quarter of all cases."""
Arm = tuple[str, float]


class Hypothesis(NamedTuple):
    """What is shown, or not: an arm lies less than ``margin`` points above a rival."""

    says: str
    found: Difference
    margin: float

    @property
    def p(self) -> float:
        """How likely what was found would be, were it not so."""
        return self.found.p(self.margin)


@dataclass(frozen=True)
class Criterion:
    """One line of the protocol.

    Attributes:
        says: what is asked.
        found: what was found.
        met: whether that is so; None of what is told beside the criteria.
    """

    says: str
    found: str
    met: bool | None


class Judgement:
    """What a stage's finished runs say of the protocol's two questions.

    Args:
        stage: bases, tasks and arms.
        finished: the runs.
        words: only bases and tasks that have all of these in their names. Raises UserError where there are none.

    Attributes:
        keys: bases and tasks.
        plain: R of each base and task.
        arms: by arm and value, the adapters that it keeps.
        hypotheses: H1 to H8 by name, those of which there are runs.
        shown: those that are shown, corrected by Holm; none of one seed.
    """

    def __init__(self, stage: Stage, finished: Finished, words: Sequence[str] = ()) -> None:
        self.stage, self.finished = stage, finished
        self.keys = cells.chosen([(base, task) for base in stage.bases for task in stage.tasks], words)
        self.plain = self._of(lambda base, task: reference(base, task, finished))
        self.arms = {
            arm: self._of(lambda base, task, arm=arm: kept(Cell(base, task, *arm, 0.0), finished))
            for arm in ((name, value) for name, values in ARMS.items() for value in values)
        }
        self.hypotheses = {name: each for name, each in self._hypotheses() if each}
        told = self.hypotheses.items()
        self.shown = holm({name: each.p for name, each in told if name not in OF_ONE_SEED}, HYPOTHESES)

    def _of(self, find: Callable[[str, str], Judged | None]) -> Of:
        every = {key: find(*key) for key in self.keys}
        return {key: found for key, found in every.items() if found}

    def so_far(self, arm: Arm, drift: float = math.inf) -> Of:
        """The adapters of an arm at the best of the rates that are run, and drift by at most so much, where R is
        known."""
        found = self._of(lambda base, task: so_far(Cell(base, task, *arm, 0.0), self.finished, drift))
        return {key: judged for key, judged in found.items() if key in self.plain}

    def more(self, what: str, arm: Arm, rivals: Of) -> Difference | None:
        """What an arm has more than others, as of ``evidence.difference``."""
        return difference(what, self.arms[arm], rivals, self.finished)

    def beside_plain(self, what: str, of: Of) -> tuple[Difference | None, Difference | None]:
        """What adapters have more than the base, and what R has more, on the same tasks and with the same seeds."""
        pair = (of, self.plain), (self.plain, of)
        mine, theirs = (difference(what, one, None, self.finished, beside=other) for one, other in pair)
        return mine, theirs

    def free(self, arm: Arm, rival: str = "F") -> Of:
        """F or F' of each base and task, for a loop."""
        found = self._of(lambda base, task: RIVALS[rival](Cell(base, task, *arm, 0.0), self.finished))
        return {key: Judged(*each) for key, each in found.items()}

    @property
    def one_kl(self) -> Arm | None:
        """The fixed weight of drift that validates best over all of the stage; None until all are known."""
        value = best_kl(self.stage, self.finished)
        return None if value is None else ("kl", value)

    def _hypotheses(self):
        def of(name: str, says: str, found: Difference | None, margin: float) -> tuple[str, Hypothesis | None]:
            return name, Hypothesis(says, found, margin) if found else None

        yield of("H1", "auto needs fewer test bits than R", self.more("test", AUTO, self.plain), 0.0)
        for number, arm in enumerate(DRIFT):
            learned = self.more("test", arm, self.plain)
            yield of(f"H{2 + number}", f"{arm[1]:.0%}: test bits within a point of R's", learned, 1.0)
        for number, arm in enumerate(DRIFT):
            lost = self.more("others", arm, self.free(arm))
            yield of(f"H{5 + number}", f"{arm[1]:.0%}: the four texts cost less than under F", lost, 0.0)
        if one := self.one_kl:
            lost = self.more("others", one, self.arms[MIDDLE])
            yield of("H8", f"kl {one[1]:g}: the four texts within a point of the budget of 2 %", lost, 1.0)

    def of_auto(self) -> list[Criterion]:
        """Whether auto becomes the default; none where there are no runs."""
        if "H1" not in self.hypotheses:
            return []
        learned, lost = (self.more(what, AUTO, self.plain) for what in ("test", "others"))
        worst = max(learned.by_task, key=lambda key: learned.by_task[key])
        return [
            self._shown("H1"),
            _most("on no task more than 1 point above R", learned.by_task[worst], 1.0, f" ({' '.join(worst)})"),
            _most("the four texts at most 0.5 points more", lost.estimate.mean, 0.5),
            *self._fewer(AUTO, 2.0),
            self._against(AUTO, *RIVALS),
        ]

    def of_budget(self, number: int) -> list[Criterion]:
        """Whether one of the budgets could be the default; none where there are no runs."""
        arm, learns, loses = DRIFT[number], f"H{2 + number}", f"H{5 + number}"
        if not {learns, loses} <= self.hypotheses.keys():
            return []
        (lost, of_plain), (known, known_of_plain) = (
            self.beside_plain(what, self.arms[arm]) for what in ("others", "known")
        )
        cost = processor_seconds(self.arms[arm], self.plain, self.finished)
        return [
            self._shown(learns),
            *self._fewer(arm, 5.0),
            _most("of what R adds on the four texts at most half", lost.estimate.mean, of_plain.estimate.mean / 2,
                  of_tasks(lost)),
            *([_most("of the known answers that R loses at most half", -known.estimate.mean,
                     -known_of_plain.estimate.mean / 2, of_tasks(known))] if known else []),
            self._shown(loses),
            self._against(arm, "F'"),
            _most("times plain's processor seconds at most 1.25", cost, 1.25),
        ]  # fmt: skip

    def auto_leaves(self) -> list[Criterion]:
        """Of this stage; it takes SmolLM2's and stage A's."""
        if "H1" not in self.hypotheses:
            return []
        return [Criterion("H1 is not shown, here", _told(self, "H1"), "H1" not in self.shown)]

    def drift_leaves(self) -> list[Criterion]:
        """Whether the loop goes: by one of these; none where there are no runs of the budget of 2 %."""
        if "H6" not in self.hypotheses:
            return []
        found = [Criterion("the budget of 2 % costs the four texts no less than F", _told(self, "H6"),
                           "H6" not in self.shown)]  # fmt: skip
        if "H8" in self.hypotheses and (learned := self.more("test", self.one_kl, self.arms[MIDDLE])):
            as_much = learned.estimate.mean <= 1.0
            says = "a fixed weight is as good as the budget of 2 % on the four texts, and learns as much"
            found.append(
                Criterion(
                    says, f"{_told(self, 'H8')}; test {learned.estimate.mean:+.2f}", "H8" in self.shown and as_much
                )
            )
        return found

    def of_advice(self) -> tuple[list[Criterion], bool]:
        """Whether the budget of 5 % is advised in the place of 2 %: on the seeds that were run after this was
        asked, at the rates that were named then; and whether all of these are run."""
        found = self._compared(self._large(), self.arms[MIDDLE], SEEDS[1:])
        return _better(found, LEVEL), self._whole(found, self.stage.tasks, len(SEEDS[1:]))

    def of_rate(self) -> tuple[list[Criterion], bool]:
        """Whether a budget of 5 % doubles the default rate: on the tasks of SmolLM2 that have chosen no rate; and
        whether all of these are run."""
        tasks = [task for task in self.stage.tasks if task not in grid.STAGES["B"].tasks]
        usual, twice = ({key: Judged(Cell(*key, *grid.LARGE, rate), "best") for key in self.keys if key[1] in tasks}
                        for rate in grid.DEFAULT_RATES)  # fmt: skip
        found = self._compared(twice, usual, SEEDS[:2])
        return _better(found, 0.99), self._whole(found, tasks, 2)

    def of_loop(self) -> tuple[list[Criterion], bool]:
        """Whether a fixed weight within the budget of 5 % takes the place of the loop; and whether all is run."""
        found = self._compared(self.so_far(grid.HELD), self._large(), SEEDS)
        asked = {
            "others": ("costs the four texts less than a point more: the interval is below 1", lambda it: it.high < 1),
            "test": ("needs at most a point more test bits", lambda it: it.mean <= 1),
            "right": ("has at most 5 of 100 fewer questions right", lambda it: it.mean >= -5),
        }
        return _criteria(found, asked), self._whole(found, self.stage.tasks, len(SEEDS))

    def _large(self) -> Of:
        return {key: Judged(grid.large(*key), "best") for key in self.keys}

    def _compared(self, of: Of, other: Of, seeds: Sequence[int]) -> dict[str, Difference]:
        """By what is measured, what adapters have more than others on these seeds; without what has no run."""
        pairs = ((what, difference(what, of, other, self.finished, of_seeds=seeds))
                 for what in ("test", "right", "known", "others"))  # fmt: skip
        return {what: more for what, more in pairs if more}

    def _whole(self, found: dict[str, Difference], tasks: Sequence[str], seeds: int) -> bool:
        """Whether all tasks were compared on all of so many seeds."""
        asked = len(self.stage.bases) * len(tasks), seeds
        return "test" in found and (len(found["test"].by_task), found["test"].seeds) == asked

    def complete(self, *hypotheses: str) -> bool:
        """Whether these have every base and task of the stage and their seeds, and no hypothesis without runs can
        change what is shown; those about F, all arms that it is of."""
        tasks = len(self.stage.bases) * len(self.stage.tasks)
        of = {name: self.hypotheses[name].found for name in hypotheses if name in self.hypotheses}
        compared = len(of) == len(hypotheses) and all(
            len(found.by_task) == tasks and found.seeds >= (1 if name in OF_ONE_SEED else len(SEEDS))
            for name, found in of.items()
        )
        compared = compared and all(map(self._final, hypotheses))
        arms = [arm for group in self.stage.groups for arm in group if arm[0] in grid.RIVALS and OF_F & {*hypotheses}]
        return compared and all(len(self.arms[arm]) == tasks for arm in arms)

    def _final(self, name: str) -> bool:
        """Whether hypotheses that have no runs yet cannot change whether this one is shown: Holm shows more with them,
        never less, and nothing at a p above the level."""
        every = len(self.hypotheses) == HYPOTHESES
        return every or name in self.shown or name in OF_ONE_SEED or self.hypotheses[name].p > 1 - LEVEL

    def _fewer(self, arm: Arm, most: float) -> list[Criterion]:
        """Of the questions that R has right at most so many per cent fewer; none where no task has questions."""
        of = self.arms[arm]
        found = [pair for key in shared([of, self.plain], self.finished)
                 if None not in (pair := [count("right", key, *each, self.finished)
                                          for each in ((of, self.plain), (self.plain, of))])]  # fmt: skip
        mine, theirs = (sum(pair[place][0] for pair in found) for place in range(2))
        fewer = 100 * (1 - mine / theirs) if theirs else 0.0
        return [_most(f"at most {most:g} % fewer questions right", fewer, most, f", {len(found)} tasks")] * bool(found)

    def _shown(self, name: str) -> Criterion:
        return Criterion(f"{name}: {self.hypotheses[name].says}", _told(self, name), name in self.shown)

    def _against(self, arm: Arm, *rivals: str) -> Criterion:
        found = {name: self.more("others", arm, self.free(arm, name)) for name in rivals}
        told = [f"{name} {more}{of_tasks(more)}" if more else f"{name} no runs" for name, more in found.items()]
        return Criterion(f"the four texts cost less than under {' and '.join(rivals)}", "; ".join(told), None)


def _criteria(
    found: dict[str, Difference], asked: dict[str, tuple[str, Callable[[Estimate], bool]]]
) -> list[Criterion]:
    return [Criterion(asked[what][0], f"{more}{of_tasks(more)}", asked[what][1](more.estimate))
            for what, more in found.items() if what in asked]  # fmt: skip


def _better(found: dict[str, Difference], level: float) -> list[Criterion]:
    """Whether adapters learn more than others, by an interval of this level, and lose about as little."""
    asked = {
        "test": ("needs fewer test bits: the interval is below 0", lambda _: found["test"].p() <= (1 - level) / 2),
        "right": ("has no fewer questions right", lambda more: more.mean >= 0),
        "known": ("loses at most 5 % of the known answers more", lambda more: more.mean >= -5),
        "others": ("costs the four texts at most 2 points more", lambda more: more.mean <= 2),
    }
    return _criteria(found, asked)


def _told(judgement: Judgement, name: str) -> str:
    if name not in judgement.hypotheses:
        return "no runs"
    each = judgement.hypotheses[name]
    return f"{each.found}, p {each.p:.2g}{of_tasks(each.found)}"


def of_tasks(found: Difference) -> str:
    """Of how many bases and tasks and seeds a difference is, to stand behind it."""
    return f", {len(found.by_task)} tasks, seeds: {found.seeds}"


def _most(says: str, found: float, most: float, more: str = "") -> Criterion:
    return Criterion(says, f"{found:+.2f}, asked {most:.2f}{more}", found <= most)
