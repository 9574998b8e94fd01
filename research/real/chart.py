"""A picture a question: what auto changes on each task, and what each arm learned over what it lost."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from granite_scu.config.errors import UserError
from granite_scu.storage.atomic import replacing
from granite_scu.viz import style
from research.real.evidence import difference
from research.real.grid import ARMS, FORMER, LARGE
from research.real.judgement import AUTO, MIDDLE, RIVALS, WIDE, Judgement
from research.real.report import KL, SLACK, named

LOOKS = {
    "R": (style.VERMILION, "o"), "F": (style.VERMILION, "^"), "F'": (style.VERMILION, "v"),
    "auto": (style.GREEN, "D"), "drift": (style.BLUE, "o"), "wide": (style.BLUE, "h"),
    "kl": (style.SKY, "s"), "held": (style.SKY, "o"), "within": (style.SKY, "D"), "replay": (style.PURPLE, "X"),
    "lambda": (style.GREY, "^"), "decay": (style.ORANGE, "v"), "dropout": (style.ORANGE, "P"),
    "rank": (style.INK, "p"), "both": (style.INK, "*"),
}  # fmt: skip

IN_WORDS = {
    "R": "plain LoRA (R)", "F": "best free way (F)", "F'": "plain, scaled (F')",
    "drift": "--max-drift", "kl": "fixed weight", "held": "fixed weight within", "wide": "former loop",
    "replay": "general text", "within": "fixed weight 1, within 5%",
}  # fmt: skip
"""Arms by names that a reader knows who has not read the protocol."""


def write(judgement: Judgement, question: str, path: Path) -> None:
    """Draw one and write a PNG. Raises UserError where there are no runs of it."""
    with style.as_designed(), replacing(path) as temporary:
        CHARTS[question](judgement).savefig(temporary, format="png", dpi=100)


def auto(judgement: Judgement) -> Figure:
    """Points of test bits and of the four texts that auto's adapter has more than R's, a line a base and task."""
    panels = {"own test text": judgement.more("test", AUTO, judgement.plain),
              "four other texts": judgement.more("others", AUTO, judgement.plain)}  # fmt: skip
    if None in panels.values():
        raise UserError("--chart: no finished runs of auto and plain; run --stage first")
    keys = sorted(panels["own test text"].by_task, reverse=True)
    figure = Figure(figsize=(8, min(style.TALLEST, 1.4 + 0.28 * len(keys))), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, found) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        axes.axvline(0, color=style.GREY)
        low, high = found.estimate.low, found.estimate.high
        axes.axvspan(low, high, color=style.GREEN, alpha=0.2, linewidth=0)
        axes.plot([found.by_task[key] for key in keys], range(len(keys)), "D", color=style.GREEN, markersize=6)
        axes.set_yticks(range(len(keys)), [" ".join(key).removeprefix("tiny-") for key in keys])
        axes.set_ylim(-0.7, len(keys) - 0.3)
        axes.set_title(title, fontsize=style.TICKS, loc="left")
        style.tidy(axes)
    figure.supxlabel("auto, points above R; band: 95 % interval of the mean", fontsize=style.TICKS)
    return figure


def drift(judgement: Judgement) -> Figure:
    """What each arm learned over what it lost, the mean of the bases and tasks that a budget of 2 % and R have: to the
    upper left is better. Each at the best of its rates that are run; an arm that has not all of them is left out, and
    one that is not run any more. Of a fixed weight also the best rate at which drift stays within 5 %."""
    middle = MIDDLE if judgement.arms[MIDDLE] else WIDE
    common = judgement.plain.keys() & judgement.arms[middle].keys()
    rivals = {(name, 0.0): judgement.free(middle, name) for name in RIVALS}
    rivals[("within", 0.0)] = judgement.so_far(KL, SLACK * LARGE[1])
    own = {arm: judgement.so_far(arm) for arm in sorted(judgement.arms)}
    arms = {("R", 0.0): judgement.plain} | rivals | own
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes, shown = figure.subplots(), {}
    for (arm, value), every in arms.items():
        is_former = arm in FORMER and (arm, value) != middle
        if arm == "plain" or is_former or not common <= every.keys():
            continue
        of = {key: judged for key, judged in every.items() if key in common}
        lost, learned = (difference(what, of, None, judgement.finished) for what in ("others", "test"))
        if lost and learned:
            colour, marker = LOOKS[arm]
            larger = sorted(ARMS.get(arm, (value,))).index(value)  # the greater the value; drawn below the smaller
            label = named((arm, value)).replace(arm, IN_WORDS.get(arm, arm), 1)
            (shown[label],) = axes.plot(
                lost.estimate.mean, -learned.estimate.mean, marker, color=colour, markersize=9 + 3 * larger,
                markeredgecolor="white", zorder=5 - larger,
            )  # fmt: skip
    if not shown:
        raise UserError(f"--chart: no finished runs of {named(MIDDLE)} and plain; run --stage first")
    axes.axvline(0, color=style.GREY)
    axes.set_xlabel(f"four other texts: bits more, % (than the base; tasks: {len(common)})", fontsize=style.TICKS)
    axes.set_ylabel("own test records: bits less, %", fontsize=style.TICKS)
    style.tidy(axes)
    figure.legend(shown.values(), shown, loc="outside upper center", ncols=3, frameon=False, fontsize=style.LEGEND)
    return figure


CHARTS: dict[str, Callable[[Judgement], Figure]] = {"auto": auto, "drift": drift}
