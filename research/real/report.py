"""The tables of the protocol: what each question's criteria say, every arm beside R, and the same task by task."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from research.real.evidence import (
    Difference,
    Judged,
    Key,
    Of,
    count,
    difference,
    mean,
    processor_seconds,
    shared,
)
from research.real.grid import FORMER, LARGE, SCALED, Cell, Finished, adapter, interior, settled
from research.real.judgement import BUDGETS, MIDDLE, RIVALS, WIDE, Arm, Criterion, Judgement, of_tasks


def auto(judgement: Judgement, console: Console) -> None:
    """Should ``--target-s auto`` be a default, or in the package at all?"""
    _say("auto becomes the default", judgement.of_auto(), judgement.complete("H1"), console)
    _say(
        "auto leaves the package, where stage A and SmolLM2 agree",
        judgement.auto_leaves(),
        judgement.complete("H1"),
        console,
        any,
    )


def drift(judgement: Judgement, console: Console) -> None:
    """Should ``--max-drift`` be a default, at which budget, or in the package at all?"""
    for number, budget in enumerate(BUDGETS):
        criteria = judgement.of_budget(number)
        complete = judgement.complete(f"H{2 + number}", f"H{5 + number}")
        _say(f"a budget of {budget:.0%} could be the default", criteria, complete, console)
    _say("a budget of 5% is advised, by seeds 1 to 4", *judgement.of_advice(), console)
    if (of_rate := judgement.of_rate())[0]:
        _say("a budget of 5% doubles the default rate", *of_rate, console)
    _say("a fixed weight within the budget of 5% takes the loop's place", *judgement.of_loop(), console)
    _say("drift leaves the package", judgement.drift_leaves(), judgement.complete("H6", "H8"), console, any)
    for arm in (MIDDLE, LARGE):
        console.print(_beside(judgement, arm))


def _beside(judgement: Judgement, arm: Arm) -> Table:
    """What a fixed weight, at its best rate within a budget, and the F of 2 % have more than that budget at its best
    rate so far."""
    budget, within = judgement.so_far(arm), judgement.so_far(KL, SLACK * arm[1])
    rivals = {f"{named(KL)}, at its best rate within {SLACK:g} of the drift": within, "F of 2%": judgement.free(MIDDLE)}
    made = _table(f"above a budget of {arm[1]:.0%}, in points or of 100", ("", *rivals))
    for what in ("test", "others", "right", "known"):
        every = (difference(what, of, budget, judgement.finished) for of in rivals.values())
        made.add_row(what, *(f"{found}{of_tasks(found)}" if found else "-" for found in every))
    return made


def _say(what: str, criteria: list[Criterion], complete: bool, console: Console,
         take: Callable[[list[bool]], bool] = all) -> None:  # fmt: skip
    met = [criterion.met for criterion in criteria if criterion.met is not None]
    verdict = "no runs" if not criteria else "undecided" if not complete else "yes" if take(met) else "no"
    so_far = "" if complete else "so far "
    made = _table(f"{what}: {verdict}", ("criterion", "found, in points or per cent", "met"))
    for criterion in criteria:
        yes = "-" if criterion.met is None else so_far + ("yes" if criterion.met else "no")
        made.add_row(criterion.says, criterion.found, yes)
    console.print(made)


def _table(title: str, columns: tuple[str, ...], figures: str = "left") -> Table:
    made = Table(title=title)
    for number, name in enumerate(columns):
        made.add_column(name, justify=figures if number else "left")
    return made


def named(arm: Arm) -> str:
    """An arm and its value, as flags have it."""
    name, value = arm
    share = name in ("drift", "held", "replay", "both", *FORMER)
    return f"{name} {value:.0%}" if share else f"{name} {value:g}" if value else name


KL: Arm = ("kl", 1.0)
SLACK = 1.1
"""Of a budget, up to which a run with one keeps an adapter."""
COLUMNS = ("arm", "tasks", "seeds", "test, points\nabove R", "of all questions\nabove R", "four texts\nabove base; R's",
           "known lost;\nR's", "drift;\nR's", "tokens", "cpu, over\nplain", "rate at\nan end")  # fmt: skip


def arms(judgement: Judgement, console: Console) -> None:
    """Every arm and value, the mean of the bases and tasks that it and R have; what is R's is of the same. Of one whose
    rates are not all run, the best so far besides."""
    made = _table("what each arm learned and lost", COLUMNS, "right")
    every = {"R": judgement.plain, **{named(arm): of for arm, of in judgement.arms.items()}}
    for arm in judgement.arms:
        of = judgement.so_far(arm)
        if len(of) > len(judgement.arms[arm]):
            every[f"{named(arm)}, so far"] = of
    for name, found in every.items():
        if of := {key: judged for key, judged in found.items() if key in judgement.plain}:
            made.add_row(*row(judgement, name, of))
    console.print(made)


def row(judgement: Judgement, name: str, of: Of) -> list[str]:
    """An arm as cells of the table, in the order of ``COLUMNS``."""
    finished, plain = judgement.finished, judgement.plain
    learned, right = (difference(what, of, plain, finished) for what in ("test", "right"))
    lost, of_plain = judgement.beside_plain("others", of)
    known = ["-" if each is None else f"{-each.estimate.mean:.1f} %" for each in judgement.beside_plain("known", of)]
    drifts = [f"{_mean('drift', *pair, finished):.2%}" for pair in ((of, plain), (plain, of))]
    ends = sum(not interior(each.cell, finished, each.point) for each in of.values())
    return [
        name,
        str(len(of)),
        str(learned.seeds if learned else 0),
        _two_lines(learned),
        _two_lines(right, f", of {len(right.by_task)}" if right else ""),
        _two_lines(lost, f"; {of_plain.estimate.mean:+.2f}" if of_plain else ""),
        ";\n".join(known),
        ";\n".join(drifts),
        f"{mean(lambda line, *_: line['tokens'], of, plain, finished):,.0f}",
        f"{processor_seconds(of, plain, finished):.2f}",
        f"{ends} of {len(of)}",
    ]


def _two_lines(found: Difference | None, more: str = "") -> str:
    return str(found or "-").replace(" (", f"{more}\n(")


def _mean(what: str, of: Of, beside: Of, finished: Finished) -> float:
    return mean(lambda line, point, _: adapter(line, point)[what], of, beside, finished)


TASK_COLUMNS = ("arm, rate, adapter", "test, points above R", "of R's\nbits", "right", "known lost",
                "four texts above base", "valid.\nbits", "drift", "cpu, over\nplain", "seeds")  # fmt: skip


POINTS = {"plain": ("best", *SCALED.values()), "drift": ("best", "end"), "wide": ("best", "end")}
"""Which adapters are shown of an arm; of others that which is kept."""


def tasks(judgement: Judgement, console: Console, rate: float | None = None) -> None:
    """Every arm and value on each base and task of which R is known, and the free rivals of a budget of 2 %. Of an arm
    whose rates are not all run, the best so far; or all arms at one rate, plain with its scaled adapters among
    them."""
    rivals = [(f"{name}{more}: ", judgement.free(arm, name))
              for arm, more in ((MIDDLE, ""), (WIDE, ", wide")) for name in RIVALS]  # fmt: skip
    every = [("R: ", judgement.plain), *rivals]
    for arm in sorted(judgement.arms):
        every += _of_arm(judgement, arm, rate)
    if not judgement.plain:
        console.print("no runs: R is known on none of these tasks yet")
    for key in judgement.plain:
        made = _table(f"{' '.join(key)} (F and F': of a budget of 2%)", TASK_COLUMNS, "right")
        for name, of in every:
            if key in of:
                made.add_row(*task_row(judgement, name, key, {key: of[key]}))
        console.print(made)


def _of_arm(judgement: Judgement, arm: Arm, rate: float | None) -> list[tuple[str, Of]]:
    """The rows of an arm, of plain at its own rates none: that is R."""
    if rate:
        tried, unsettled = {key: Cell(*key, *arm, rate) for key in judgement.plain}, {}
        of = {key: Judged(cell, "best") for key, cell in tried.items() if cell in judgement.finished}
    else:
        of = judgement.arms[arm] if arm[0] != "plain" else {}
        unsettled = {key: best for key, best in judgement.so_far(arm).items() if key not in judgement.arms[arm]}
    points = POINTS.get(arm[0], ("best",))
    rows = [("", {key: judged._replace(point=point) for key, judged in of.items()}) for point in points]
    return [*rows, ("so far: ", unsettled)]


def task_row(judgement: Judgement, name: str, key: Key, of: Of) -> list[str]:
    """An adapter on one base and task as cells of the table, in the order of ``TASK_COLUMNS``."""
    finished, plain, (cell, point) = judgement.finished, judgement.plain, of[key]
    learned = difference("test", of, plain, finished)
    of_plain = difference("test", plain, None, finished, beside=of)
    lost, _ = judgement.beside_plain("others", of)
    asked = [count(text, key, of, plain, finished) for text in ("right", "known")]
    known = settled(cell, finished)
    is_chosen = known and known.get(point) == cell.rate
    at_end = ", at an end" if is_chosen and not interior(cell, finished, point) else ""
    shown = f"x {float(point.removeprefix('x ')):.2g}" if point.startswith("x ") else point
    return [
        f"{name}{named((cell.arm, cell.value))}, {cell.rate:g}{at_end}, {shown}",
        str(learned),
        f"{100 * learned.estimate.mean / (100 + of_plain.estimate.mean):+.1f} %",
        *(f"{each[0]:.3g} of {each[1]}" if each else "-" for each in asked),
        str(lost),
        f"{_mean('validation', of, plain, finished):.3g}",
        f"{_mean('drift', of, plain, finished):.2%}",
        f"{processor_seconds(of, plain, finished):.2f}",
        str(len(shared([of, plain], finished)[key])),
    ]


TABLES = {"auto": auto, "drift": drift, "arms": arms, "tasks": tasks}
