"""Ways to set lambda, compared: bits per token on held-out documents, a panel for each task.

    python -m research.comparison.plot DIR/comparison.json [--out DIR]

writes ``comparison.png`` and ``comparison.svg`` beside the file, or into DIR; of many tasks ``comparison-2`` and so on
too, so that each fits a screen.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from granite_scu.config.errors import UserError
from granite_scu.viz import style
from research.drawing import draw_to

# Shapes tell the same apart in grey.
_COLOURS = {"better": style.GREEN, "worse": style.VERMILION, "same": style.GREY, "reference": style.BLUE}
_MARKERS = {"better": "v", "worse": "^", "same": "o", "reference": "D"}
_WORDS = {
    "reference": "reference",
    "better": "better",
    "worse": "worse",
    "same": "no difference shown",
}
_POINTS = (
    (style.BLUE, "D"), (style.VERMILION, "o"), (style.GREEN, "s"), (style.PURPLE, "^"), (style.ORANGE, "v"),
    (style.INK, "P"),
)  # fmt: skip
_FILLS = (True, False)
_TICKS = 12.5  # points; the panels stand side by side
_FAR = 3.0
"""Times the typical distance to the reference beyond which a point leaves the panel and is written at its edge."""


_MARGIN = 1.1
"""Inches above and below the panels of a page."""

Pair = tuple[list[dict[str, Any]], list[str]]
"""One or two tasks, and the arms that have a line in their panels."""


def read_comparison(file: Path) -> dict[str, Any]:
    """What ``scripts/compare_controllers.py`` found.

    Raises:
        UserError: it is not that, or no task has a finished run.
    """
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        rows = [row for task in results["tasks"] if task["name"] for row in task["rows"]]
        for row in rows:
            str(row["name"]), bool(row["is_reference"])
            for found, numbers in ((row["test_bpt"], ("mean",)), (row["difference"], ("mean", "low", "high"))):
                [float(found[number]) for number in numbers if found is not None]
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{file}: not the comparison.json of scripts/compare_controllers.py ({error!r})") from error
    results["tasks"] = [task for task in results["tasks"] if any(row["test_bpt"] for row in task["rows"])]
    if not results["tasks"]:
        raise UserError(f"{file}: no task has a finished run")
    return results


def plot_comparison(results: dict[str, Any]) -> dict[str, Figure]:
    """A panel for each task: a line for each arm, its test score, and the interval of its distance to the reference.

    Two panels side by side share their lines: those of the arms that either has.

    Returns:
        ``comparison``, and where one picture would not fit a screen ``comparison-2`` and so on.
    """
    tasks = results["tasks"]
    order = list(dict.fromkeys(_arm(row) for task in tasks for row in task["rows"]))
    pages: list[list[Pair]] = [[]]
    for i in range(0, len(tasks), 2):
        pair = tasks[i : i + 2]
        there = {_arm(row) for task in pair for row in _scored(task)}
        pages[-1].append((pair, [arm for arm in order if arm in there]))
        if len(pages[-1]) > 1 and _MARGIN + sum(map(_height, pages[-1])) > style.TALLEST:
            pages.append([pages[-1].pop()])
    return {f"comparison-{k}" if k > 1 else "comparison": _plot_page(page) for k, page in enumerate(pages, 1)}


def _height(pair: Pair) -> float:
    """Of two panels, in inches."""
    return min(0.75 + 0.2 * len(pair[1]), style.TALLEST - _MARGIN)


def _plot_page(pairs: list[Pair]) -> Figure:
    tasks = [task for pair, _ in pairs for task in pair]
    figure, panels = _panels(len(tasks), 2, _MARGIN, list(map(_height, pairs)), sharey="row")
    for number, (axes, task) in enumerate(zip(panels, tasks, strict=True)):
        _plot_task(axes, task, pairs[number // 2][1])
    figure.supxlabel("bits per token on held-out documents", fontsize=style.LABEL, color=style.INK)
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    words = [word for word in _WORDS.values() if word in handles]
    figure.legend(
        [handles[word] for word in words],
        words,
        loc="outside upper right",
        ncols=4,
        frameon=False,
        fontsize=style.LEGEND,
        labelcolor=style.INK,
        columnspacing=1.2,
        handletextpad=0.3,
    )
    return figure


def _panels(count: int, columns: int, margin: float, heights: list[float], **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure of at most so many columns, and its panels; the heights of the lines in inches."""
    columns = max(1, min(columns, count))
    figure = Figure(figsize=(8, margin + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights, **shared)
    panels = list(grid.flatten())
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def plot_operating_points(results: dict[str, Any]) -> Figure:
    """A panel for each task: where each arm's S ended, and the test score it had there."""
    tasks = [task for task in results["tasks"] if any(_operates(row) for row in task["rows"])]
    arms = list(dict.fromkeys(_arm(row) for task in tasks for row in task["rows"] if _operates(row)))
    looks = dict(zip(arms, itertools.cycle(itertools.product(_POINTS, _FILLS)), strict=False))
    lines = max(1, math.ceil(len(tasks) / 3))
    figure, panels = _panels(len(tasks), 3, 1.6, [min(2.6, (style.TALLEST - 1.6) / lines)] * lines, sharex=True)
    for axes, task in zip(panels, tasks, strict=True):
        _plot_operation(axes, task, looks)
    figure.supxlabel("S at the end (share of bits)", fontsize=style.LABEL, color=style.INK)
    figure.supylabel("held-out documents (bits per token)", fontsize=style.LABEL, color=style.INK)
    handles = [
        Line2D([], [], color=colour, marker=marker, markerfacecolor=colour if face else "white", markersize=9,
               markeredgewidth=1.8, linestyle="none", label=arm)
        for arm, ((colour, marker), face) in looks.items()
    ]  # fmt: skip
    longest = max(map(len, arms), default=1)
    figure.legend(
        handles=handles, loc="outside upper left", ncols=max(1, min(4, 80 // (longest + 5))), frameon=False,
        fontsize=style.LEGEND, labelcolor=style.INK, handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return draw_file("plot", _both, arguments)


def _both(results: dict[str, Any]) -> dict[str, Figure]:
    return plot_comparison(results) | {"operating_points": plot_operating_points(results)}


def draw_file(name: str, plot: Callable[[dict[str, Any]], dict[str, Figure]], arguments: Sequence[str] | None) -> int:
    """Draw the ``comparison.json`` that a command line names, as PNG and SVG; returns the exit code.

    Args:
        name: of the command.
        plot: makes the figures, by the names of their files.
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m research.comparison.{name}", description="Draw what a comparison found."
    )
    parser.add_argument("results", metavar="FILE", type=Path, help="comparison.json")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder for the pictures (default: that of FILE)")
    options = parser.parse_args(arguments)
    folder = options.out or options.results.parent
    return draw_to(folder, lambda: plot(read_comparison(options.results)))


def _plot_task(axes: Axes, task: dict[str, Any], arms: list[str]) -> None:
    rows = _scored(task)
    low, high = _limits(rows)
    for row in rows:
        y, x, paired = arms.index(_arm(row)), row["test_bpt"]["mean"], row["difference"]
        kind = _kind(row)
        if x > high:
            axes.annotate(
                f"{x:.3f}", (1, y), xytext=(0.8, y), xycoords=("axes fraction", "data"), va="center", ha="right",
                fontsize=_TICKS, color=_COLOURS[kind], textcoords=("axes fraction", "data"),
                arrowprops={"arrowstyle": "->", "color": _COLOURS[kind], "linewidth": 1.6},
            )  # fmt: skip
            continue
        if paired:
            centre = x - paired["mean"]
            axes.plot([centre + paired["low"], centre + paired["high"]], [y, y], color=_COLOURS[kind], linewidth=2.2)
        axes.plot(x, y, _MARKERS[kind], color=_COLOURS[kind], markersize=8, label=_WORDS[kind], linestyle="none")
        if kind == "reference":
            axes.axvline(x, color=_COLOURS[kind], linewidth=1.0, dashes=(4, 3), zorder=0)
    axes.set_xlim(low, high)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_yticks(range(len(arms)), arms)
    axes.set_title(task["name"], fontsize=style.LEGEND, color=style.INK, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(3))
    style.tidy(axes, _TICKS)
    axes.tick_params(axis="y", length=0)


def _plot_operation(axes: Axes, task: dict[str, Any], looks: dict[str, Any]) -> None:
    rows = [row for row in task["rows"] if _operates(row)]
    means = sorted(row["test_bpt"]["mean"] for row in rows)
    shown = _without_far(means)
    margin = 0.12 * (shown[-1] - shown[0]) or 0.01
    high = shown[-1] + margin
    style.in_percent(axes, "x")
    axes.set(xlim=(0, 1.04), ylim=(shown[0] - margin, high))
    above = 0
    for row in sorted(rows, key=lambda row: -row["test_bpt"]["mean"]):
        ((colour, marker), face), mean = looks[_arm(row)], row["test_bpt"]["mean"]
        point = {"color": colour, "markerfacecolor": colour if face else "white", "markeredgewidth": 1.8}
        axes.plot(
            row["s_at_end"], min(mean, high), marker, **point, markersize=9, linestyle="none", clip_on=False, zorder=3
        )
        if mean > high:  # drawn at the edge, with its number
            right = row["s_at_end"] < 0.5
            axes.annotate(
                f"{mean:.2f} ↑", (row["s_at_end"], high), xytext=(8 if right else -8, -4 - 14 * above), va="top",
                ha="left" if right else "right", textcoords="offset points", fontsize=_TICKS - 1, color=colour,
            )  # fmt: skip
            above += 1
    axes.set_title(task["name"], fontsize=style.LEGEND, color=style.INK, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    style.tidy(axes, _TICKS)


def _without_far(means: list[float]) -> list[float]:
    """Of the ascending scores all but those far above, which would squeeze the others."""
    typical = means[len(means) // 2] - means[0]
    return [mean for mean in means if mean <= means[0] + max(_FAR * typical, 1e-3)] if len(means) > 2 else means


def _limits(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Left and right of a panel: the reference, and all points but those far to the right, which would squeeze the
    others. What the intervals of these make room for is not far."""
    means = sorted(row["test_bpt"]["mean"] for row in rows)
    references = [row["test_bpt"]["mean"] for row in rows if row["is_reference"]]
    _, right = _spread(rows, max(_without_far(means) + references))
    low, high = _spread(rows, right)
    margin = 0.06 * (high - low) or 0.01
    return low - margin, high + margin


def _spread(rows: list[dict[str, Any]], right: float) -> tuple[float, float]:
    """From where to where the points up to ``right`` reach with their intervals."""
    shown = [row for row in rows if row["test_bpt"]["mean"] <= right]
    means = [row["test_bpt"]["mean"] for row in shown]
    ends = [
        mean - row["difference"]["mean"] + row["difference"][side]
        for mean, row in zip(means, shown, strict=True)
        if row["difference"]
        for side in ("low", "high")
    ]
    return min(means + ends), max(means + ends)


def _scored(task: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in task["rows"] if row["test_bpt"]]


def _operates(row: dict[str, Any]) -> bool:
    return bool(row["test_bpt"]) and row.get("s_at_end") is not None


def _kind(row: dict[str, Any]) -> str:
    if row["is_reference"]:
        return "reference"
    paired = row["difference"]
    if paired is None or not row.get("decided", True) or paired["low"] <= 0 <= paired["high"]:
        return "same"
    return "worse" if paired["mean"] > 0 else "better"


def _arm(row: dict[str, Any]) -> str:
    """The name without what a sweep chose, which differs between tasks."""
    return row["name"].split(" (")[0]


if __name__ == "__main__":
    sys.exit(main())
