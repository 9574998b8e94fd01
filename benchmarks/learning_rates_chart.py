"""The chart of ``benchmarks/learning_rates.py``: own answers right, and general ones lost, over the learning rate."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

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
    """Two panels side by side; in each a course for every kind and amount of data, of means over the seeds."""
    courses: dict[tuple[str, int, float], dict[float, list[Line]]] = {}
    for line in sorted(lines, key=lambda line: line["rate"]):
        if line["model"] == "smollm2" and line["epochs"] >= 1 and "failed" not in line:
            course = courses.setdefault((line["data"], line["records"], line["epochs"]), {})
            course.setdefault(line["rate"], []).append(line)
    courses = {name: course for name, course in sorted(courses.items()) if len(course) >= 3}
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    learned, forgot = figure.subplots(1, 2, sharey=True)
    for number, ((data, records, epochs), course) in enumerate(courses.items()):
        look = {"color": _COLOURS[number], "marker": _MARKERS[number], "markersize": 7, "linewidth": 2}
        if all("right" in line for lines in course.values() for line in lines):  # of a text nothing is asked
            learned.plot(list(course), _means(course, "right", "questions"), **look)
        label = f"{data}, {records:,} records, {epochs:g} epoch{'s' * (epochs != 1)}"
        forgot.plot(list(course), _means(course, "known_lost", "known_right_base"), **look, label=label)
    for axes, what in ((learned, "own answers right"), (forgot, "general answers lost")):
        _show_rates(axes, sorted({rate for course in courses.values() for rate in course}))
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(what, fontsize=style.LABEL)
        style.tidy(axes)
    style.in_percent(learned)
    handles, labels = forgot.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=style.LEGEND)
    return figure


def _means(course: dict[float, list[Line]], part: str, whole: str) -> list[float]:
    """A share of the runs at each rate."""
    return [statistics.mean(line[part] / line[whole] for line in lines) for lines in course.values()]


def _show_rates(axes: Any, rates: list[float]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_major_formatter(lambda rate, _: np.format_float_scientific(rate, trim="-", exp_digits=1))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("peak learning rate", fontsize=style.TICKS)
