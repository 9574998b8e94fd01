"""The tables of the protocol: what each question's criteria say, and every arm beside R."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from research.real.evidence import Difference, Of, difference, processor_seconds
from research.real.grid import adapter, interior
from research.real.judgement import BUDGETS, Criterion, Judgement


def auto(judgement: Judgement, console: Console) -> None:
    """Should ``--target-s auto`` be a default, or in the package at all?"""
    so_far = "" if judgement.complete else ", so far"
    _say(f"auto becomes the default{so_far}", judgement.of_auto(), console)
    _say(f"auto leaves the package{so_far}", judgement.auto_leaves(), console, any)


def drift(judgement: Judgement, console: Console) -> None:
    """Should ``--max-drift`` be a default, at which budget, or in the package at all?"""
    so_far = "" if judgement.complete else ", so far"
    for number, budget in enumerate(BUDGETS):
        _say(f"a budget of {budget:.0%} could be the default{so_far}", judgement.of_budget(number), console)
    _say(f"drift leaves the package{so_far}", judgement.drift_leaves(), console, any)


def _say(what: str, criteria: list[Criterion], console: Console, take: Callable[[list[bool]], bool] = all) -> None:
    made = Table(
        title=f"{what}: " + ("no runs" if not criteria else "yes" if take([c.met for c in criteria]) else "no")
    )
    for name in ("criterion", "found, in points or per cent", "met"):
        made.add_column(name)
    for criterion in criteria:
        made.add_row(criterion.says, criterion.found, "yes" if criterion.met else "no")
    console.print(made)


COLUMNS = ("arm", "tasks", "seeds", "test, points above R", "questions", "four texts above base", "known lost", "drift",
           "tokens", "cpu s", "cpu, over plain", "rate at an end")  # fmt: skip


def arms(judgement: Judgement, console: Console) -> None:
    """Every arm and value, the mean of bases and tasks."""
    made = Table(title="what each arm learned and lost")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name == "arm" else "right")
    made.add_row(*row(judgement, "R", judgement.plain))
    for (arm, value), of in judgement.arms.items():
        if of:
            made.add_row(*row(judgement, f"{arm} {value:g}" if value else arm, of))
    console.print(made)


def row(judgement: Judgement, name: str, of: Of) -> list[str]:
    """An arm as cells of the table, in the order of ``COLUMNS``."""
    finished = judgement.finished
    own = [(finished[each.cell], each) for each in of.values()]
    ran = [(line, each) for line, each in own if "points" in line]
    learned = difference("test", of, judgement.plain, finished)

    def mean(figures: list[float]) -> float:
        return sum(figures) / len(figures) if figures else float("nan")

    right, lost, known = (difference(what, of, rivals, finished) for what, rivals in
                          (("right", judgement.plain), ("others", None), ("known", None)))  # fmt: skip
    ends = sum(not interior(each.cell, finished, each.point) for _, each in own)
    return [
        name,
        str(len(own)),
        str(learned.seeds if learned else 0),
        _told(learned),
        _told(right),
        _told(lost),
        "-" if known is None else f"{-known.estimate.mean:.1f} %",
        f"{mean([adapter(line, each.point)['drift'] for line, each in ran]):.2%}",
        f"{mean([line['tokens'] for line, _ in ran]):,.0f}",
        f"{mean([line['train_cpu_s'] for line, _ in ran]):.0f}",
        f"{processor_seconds(of, judgement.plain, finished):.2f}",
        f"{ends} of {len(own)}",
    ]


def _told(found: Difference | None) -> str:
    if found is None:
        return "-"
    return f"{found.estimate.mean:+.2f} ({found.estimate.low:+.2f} to {found.estimate.high:+.2f})"


TABLES = {"auto": auto, "drift": drift, "arms": arms}
