"""The chart of ``benchmarks/learning_rates.py``: own answers right, and general ones lost, over the learning rate."""

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
    """Two panels side by side; in each a course for every kind and amount of data."""
    courses: dict[tuple[str, int, float], list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["rate"]):
        if line["model"] == "smollm2" and line["epochs"] >= 1 and "failed" not in line:
            courses.setdefault((line["data"], line["records"], line["epochs"]), []).append(line)
    courses = {name: course for name, course in sorted(courses.items()) if len(course) >= 3}
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    learned, forgot = figure.subplots(1, 2, sharey=True)
    for number, ((data, records, epochs), course) in enumerate(courses.items()):
        look = {"color": _COLOURS[number], "marker": _MARKERS[number], "markersize": 7, "linewidth": 2}
        rates = [line["rate"] for line in course]
        if all("right" in line for line in course):  # of a text nothing is asked
            learned.plot(rates, [line["right"] / line["questions"] for line in course], **look)
        label = f"{data}, {records:,} records, {epochs:g} epoch{'s' * (epochs != 1)}"
        forgot.plot(rates, [line["known_lost"] / line["known_right_base"] for line in course], **look, label=label)
    for axes, what in ((learned, "own answers right"), (forgot, "general answers lost")):
        _show_rates(axes, sorted({line["rate"] for course in courses.values() for line in course}))
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(what, fontsize=style.LABEL)
        style.tidy(axes)
    style.in_percent(learned)
    handles, labels = forgot.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=style.LEGEND)
    return figure


def _show_rates(axes: Any, rates: list[float]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_major_formatter(lambda rate, _: np.format_float_scientific(rate, trim="-", exp_digits=1))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("peak learning rate", fontsize=style.TICKS)
