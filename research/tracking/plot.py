"""Many runs against their setpoints: what ``research.tracking`` measured, drawn."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from granite_scu.viz import style

_COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE)

Run = tuple[Mapping[str, Any], Sequence[tuple[int, float | None]]]
"""A run's cell, and each step with the ratio of the smoothed S to the setpoint in force; None where S was unusable."""


def plot_tracking(runs: Sequence[Run], band: float) -> Figure:
    """A panel for each setpoint, and one for each disturbance: the smoothed S over S*, every run a line."""
    panels: dict[tuple[str, float], list[Run]] = {}
    for cell, points in runs:
        panels.setdefault((cell["disturbance"] or "", cell["setpoint"]), []).append((cell, points))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 3 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, (disturbance, setpoint) in zip(grid.flat, sorted(panels), strict=False):
        _plot_panel(axes, panels[disturbance, setpoint], band)
        axes.set_title(f"S* = {setpoint:.1%}" + (f", {disturbance}" if disturbance else ""), fontsize=12)
    peak = max((ratio for _, points in runs for _, ratio in points if ratio is not None), default=0.0)
    grid.flat[0].set_ylim(0, min(max(1.8, 1.05 * peak), 6.0))  # shared by all panels
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("optimizer steps")
    figure.supylabel("smoothed S / S*")
    return figure


def _plot_panel(axes: Any, runs: Sequence[Run], band: float) -> None:
    rates = sorted({cell["learning_rate"] for cell, _ in runs})
    axes.axhspan(1 - band, 1 + band, color=style.GREEN, alpha=0.2, linewidth=0)
    for cell, points in runs:
        steps, ratio = [step for step, _ in points], [math.nan if r is None else r for _, r in points]
        rate = cell["learning_rate"]
        axes.plot(steps, ratio, color=_COLOURS[rates.index(rate)], linewidth=1, label=f"rate {rate:g}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(color=style.FAINT, linewidth=0.6)
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    if len(first) > 1:
        axes.legend(first.values(), first.keys(), loc="lower right", fontsize=10, frameon=False)
