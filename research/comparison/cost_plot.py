"""Ways to set lambda: what each leaves above the best of a sweep, against what it costs. One point each.

    python -m research.comparison.cost_plot DIR/comparison.json [--out DIR]

writes ``cost.png`` and ``cost.svg`` beside the file, or into DIR.
"""

import sys
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator, NullFormatter

from granite_scu.viz import style
from research.comparison.plot import draw_file

AUTO = "auto"
WAYS = {
    "pi-auto-stopped": AUTO,
    "early-stopping": "early stopping",
    "pi-at-45-stopped": "S* = 45 %",
    "cascade-stopped": "cascade",
    "cosine-stopped": "best of four falling λ",
    "fixed-at-auto-mean-stopped": "auto's mean λ",
    "replay-of-auto-stopped": "auto's λ of another seed",
    "swept λ, stopped early": "best of six λ",
}
"""What is drawn, and in whose words. The adapter is the best validated one. The same sweep at its last step is 0."""

ONE = "fixed-stopped λ="
"""Constants; of these the best is drawn, which is known afterwards."""

_LINE = 0.27
"""Per cent between the names of neighbouring ways, which stand one above the other."""

_TOP = 2.0
"""Per cent; what lies above is written at the edge, as it would squeeze all others."""


def ways(results: dict[str, Any]) -> dict[str, Any]:
    """The lines of the overview that are drawn, by their words: those of the ``WAYS`` that were run on all tasks, and
    the best constant."""
    tasks = len(results["tasks"])
    lines = [line for line in results.get("overview", []) if line["cost"] and len(line["excess"]) == tasks]
    shown = {WAYS[line["name"]]: line for line in lines if line["name"] in WAYS}
    constants = [line for line in lines if line["name"].startswith(ONE)]
    if constants:
        best = min(constants, key=lambda line: line["mean"])
        shown[f"one λ = {best['name'].removeprefix(ONE)}, the best afterwards"] = best
    return shown


def plot_costs(results: dict[str, Any]) -> Figure:
    """A point for each way: the mean over the tasks, and a line up to the worst of them.

    Raises:
        ValueError: none of the ways has been run on all tasks.
    """
    shown = ways(results)
    if not shown:
        raise ValueError("no way to set lambda has been run on all tasks")
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axhline(0, color=style.INK, linewidth=1, dashes=(4, 3), zorder=0)
    axes.annotate("best of six λ, last step", (0.76, 0), xytext=(0, -5), xycoords=axes.get_yaxis_transform(), va="top",
                  ha="right", textcoords="offset points", fontsize=style.TICKS, color=style.INK)  # fmt: skip
    place = 0.0  # of the name: above that of the next dearer way, so that no name lies on a point or a line
    for label, line in sorted(shown.items(), key=lambda item: (-item[1]["cost"]["seconds"], item[1]["mean"])):
        mean, worst = 100 * line["mean"], 100 * line["worst"]
        place = max(min(worst, _TOP), place) + _LINE
        _draw(axes, line["cost"]["seconds"], mean, worst, label, place)
    low = min(100 * line["mean"] for line in shown.values())
    dearest = max(line["cost"]["seconds"] for line in shown.values())
    axes.set(xscale="log", xlim=(0.85, 1.6 * dearest), ylim=(low - 0.25, place + _LINE))
    axes.set_xticks([1, 1.5, 2, 3, 4, 6, 8], ["1", "1.5", "2", "3", "4", "6", "8"])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(MultipleLocator(0.5 if low > -2 else 1))
    axes.set_xlabel("processor time, in runs without λ", fontsize=style.LABEL, color=style.INK)
    axes.set_ylabel("test loss above the swept best (%)", fontsize=style.LABEL, color=style.INK)
    style.tidy(axes)
    return figure


def _draw(axes: Axes, x: float, mean: float, worst: float, label: str, place: float) -> None:
    """A way at its cost: mean, worst, and its name above them, at ``place``."""
    of_auto = label == AUTO
    colour = style.VERMILION if of_auto else style.BLUE
    top = min(worst, _TOP)
    axes.plot([x, x], [min(mean, _TOP), top], color=colour, linewidth=1.2)
    if worst > _TOP:
        label += f": mean {mean:.0f} %, worst {worst:.0f} %" if mean > _TOP else f": worst {worst:.0f} %"
    else:
        axes.plot(x, worst, "_", color=colour, markersize=9)
    marker = "^" if mean > _TOP else "D" if of_auto else "o"
    axes.plot(x, min(mean, _TOP), marker, color=colour, markersize=9, linestyle="none")
    axes.plot([x, x], [top, place], color=style.GREY, linewidth=0.8, linestyle=":", zorder=0)
    axes.annotate(
        label, (x, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=style.TICKS,
        color=colour if of_auto else style.INK,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return draw_file("cost_plot", lambda results: {"cost": plot_costs(results)}, arguments)


if __name__ == "__main__":
    sys.exit(main())
