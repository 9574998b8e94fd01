"""Many runs against their setpoints: what ``benchmarks/tracking.py`` measured, drawn."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from viz import style

_COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE)


def plot_tracking(results: Sequence[Mapping[str, Any]], band: float) -> Figure:
    """A panel for each setpoint, and one for each disturbance: the smoothed S over S*, every run a line."""
    panels: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for result in results:
        cell = result["cell"]
        panels.setdefault((cell["disturbance"] or "", cell["setpoint"]), []).append(result)
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 3 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, (disturbance, setpoint) in zip(grid.flat, sorted(panels), strict=False):
        _plot_panel(axes, panels[disturbance, setpoint], band)
        axes.set_title(f"S* = {setpoint:.1%}" + (f", {disturbance}" if disturbance else ""), fontsize=12)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("optimizer steps")
    figure.supylabel("smoothed S / S*")
    return figure


def _plot_panel(axes: Any, results: Sequence[Mapping[str, Any]], band: float) -> None:
    rates = sorted({result["cell"]["learning_rate"] for result in results})
    axes.axhspan(1 - band, 1 + band, color=style.GREEN, alpha=0.2, linewidth=0)
    for result in results:
        steps = [point[0] for point in result["trajectory"]]
        target = result["cell"]["setpoint"]
        ratio = [point[2] / (point[4] if len(point) > 4 else target) for point in result["trajectory"]]
        rate = result["cell"]["learning_rate"]
        axes.plot(steps, ratio, color=_COLOURS[rates.index(rate)], linewidth=1, alpha=0.8, label=f"rate {rate:g}")
    axes.set_ylim(0, 1.8)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(color=style.FAINT, linewidth=0.6)
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    if len(first) > 1:
        axes.legend(first.values(), first.keys(), loc="lower right", fontsize=10, frameon=False)
