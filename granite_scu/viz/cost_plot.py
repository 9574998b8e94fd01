"""Ways to set lambda: what each leaves above the best of a sweep, against what it costs. One point each.

    python -m granite_scu.viz.cost_plot DIR/comparison.json [--out DIR]

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
from granite_scu.viz.comparison_plot import draw_file

DEFAULT = "the default"
WAYS = {
    "pi-auto-stopped": DEFAULT,
    "early-stopping": "early stopping",
    "fixed-stopped λ=0.03": "one λ = 0.03",
    "pi-at-45-stopped": "S* = 45 %",
    "cascade-stopped": "cascade",
    "cosine-stopped": "best of four falling λ",
    "swept λ, stopped early": "best of six λ",
}
"""What is drawn, and in whose words. The adapter is the best validated one. The same sweep at its last step is 0."""

_APART = 1.15
"""The least ratio of neighbouring names' places on the axis of costs: of ways that cost the same they would overlap."""

_TOP = 2.0
"""Per cent; what lies above is written at the edge, as it would squeeze all others."""


def ways(results: dict[str, Any]) -> dict[str, Any]:
    """The lines of the overview that are drawn, by their words: those of the ``WAYS`` that were run on all tasks."""
    lines = {line["name"]: line for line in results.get("overview", []) if line["name"] in WAYS and line["cost"]}
    tasks = len(results["tasks"])
    return {WAYS[name]: line for name, line in lines.items() if len(line["excess"]) == tasks}


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
    axes.annotate("best of six λ, last step", (0.62, 0), xytext=(0, -5), xycoords=axes.get_yaxis_transform(), va="top",
                  ha="right", textcoords="offset points", fontsize=style.TICKS, color=style.INK)  # fmt: skip
    place = 0.0
    for label, line in sorted(shown.items(), key=lambda item: (item[1]["cost"]["seconds"], item[1]["mean"])):
        seconds = line["cost"]["seconds"]
        place = max(seconds, _APART * place)
        _draw(axes, seconds, 100 * line["mean"], 100 * line["worst"], label, place)
    low = min(100 * line["mean"] for line in shown.values())
    axes.set(xscale="log", xlim=(0.85, 1.6 * place), ylim=(low - 0.25, 1.95 * _TOP))
    axes.set_xticks([1, 1.5, 2, 3, 4, 6, 8], ["1", "1.5", "2", "3", "4", "6", "8"])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(MultipleLocator(0.5 if low > -2 else 1))
    axes.set_xlabel("processor time, in runs without λ", fontsize=style.LABEL, color=style.INK)
    axes.set_ylabel("bits above that of a sweep (%)", fontsize=style.LABEL, color=style.INK)
    style.tidy(axes)
    return figure


def _draw(axes: Axes, x: float, mean: float, worst: float, label: str, place: float) -> None:
    """A way at its cost: mean, worst, and its name above them, from ``place`` on."""
    default = label == DEFAULT
    colour = style.VERMILION if default else style.BLUE
    top = min(worst, _TOP)
    axes.plot([x, x], [min(mean, _TOP), top], color=colour, linewidth=1.2)
    if worst > _TOP:
        label += f": {mean:.0f}, worst {worst:.0f}" if mean > _TOP else f": worst {worst:.0f}"
    else:
        axes.plot(x, worst, "_", color=colour, markersize=9)
    marker = "^" if mean > _TOP else "D" if default else "o"
    axes.plot(x, min(mean, _TOP), marker, color=colour, markersize=9, linestyle="none")
    if place > x:
        axes.plot([x, place], [top + 0.03, top + 0.13], color=style.GREY, linewidth=0.8)
    axes.annotate(
        label, (place, top), xytext=(0, 11), textcoords="offset points", rotation=55, rotation_mode="anchor",
        fontsize=style.TICKS, color=colour if default else style.INK,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return draw_file("cost", lambda results: {"cost": plot_costs(results)}, arguments)


if __name__ == "__main__":
    sys.exit(main())
