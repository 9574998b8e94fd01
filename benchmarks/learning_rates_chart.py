"""The chart of ``benchmarks/learning_rates.py``: answers right, and what was lost, over the learning rate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.learning_rates_grid import lost
from granite_scu.storage.atomic import replacing
from granite_scu.viz import style

_COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE, style.SKY)
_MARKERS = "osD^vP"

Line = dict[str, Any]


def write(lines: list[Line], path: Path) -> None:
    """Draw the runs of the real model, those of three rates and more, and write a PNG."""
    with style.as_designed(), replacing(path) as temporary:
        draw(lines).savefig(temporary, format="png", dpi=150)


def draw(lines: list[Line]) -> Figure:
    """Two panels side by side; a line for each kind and amount of data."""
    courses: dict[tuple[str, int, float], list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["rate"]):
        if line["model"] == "smollm2" and line["epochs"] >= 1 and "failed" not in line:
            courses.setdefault((line["data"], line["records"], line["epochs"]), []).append(line)
    courses = {name: course for name, course in sorted(courses.items()) if len(course) >= 3}
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    learned, forgot = figure.subplots(1, 2)
    _panel(learned, courses, lambda line: line["right"] / line["questions"], "answers right")
    _panel(forgot, courses, lost, "lost elsewhere, bits per token")
    learned.set_ylim(-0.03, 1.03)
    style.in_percent(learned)
    forgot.set_yscale("symlog", linthresh=0.1)
    forgot.yaxis.set_major_locator(FixedLocator([0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]))
    forgot.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    forgot.yaxis.set_minor_locator(NullLocator())
    handles, labels = forgot.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=style.LEGEND)
    return figure


def _panel(
    axes: Any, courses: dict[tuple[str, int, float], list[Line]], value: Callable[[Line], float], what: str
) -> None:
    for number, ((data, records, epochs), course) in enumerate(courses.items()):
        points = [line for line in course if what != "answers right" or "right" in line]
        label = f"{data}, {records:,} records, {epochs:g} epochs"
        axes.plot([line["rate"] for line in points], [value(line) for line in points], color=_COLOURS[number],
                  marker=_MARKERS[number], markersize=7, linewidth=2, label=label)  # fmt: skip
    rates = sorted({line["rate"] for course in courses.values() for line in course})
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_major_formatter(lambda rate, _: np.format_float_scientific(rate, trim="-", exp_digits=1))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("peak learning rate", fontsize=style.TICKS)
    axes.set_title(what, fontsize=style.LABEL)
    style.tidy(axes)
