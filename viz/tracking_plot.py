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
    peak = max((ratio for result in results for ratio in _ratios(result)), default=0.0)
    grid.flat[0].set_ylim(0, min(max(1.8, 1.05 * peak), 5.0))  # shared by all panels
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("optimizer steps")
    figure.supylabel("smoothed S / S*")
    return figure


def _plot_panel(axes: Any, results: Sequence[Mapping[str, Any]], band: float) -> None:
    rates = sorted({result["cell"]["learning_rate"] for result in results})
    axes.axhspan(1 - band, 1 + band, color=style.GREEN, alpha=0.2, linewidth=0)
    for result in results:
        steps, ratio = [point[0] for point in result["trajectory"]], _ratios(result)
        rate = result["cell"]["learning_rate"]
        axes.plot(steps, ratio, color=_COLOURS[rates.index(rate)], linewidth=1, alpha=0.8, label=f"rate {rate:g}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(color=style.FAINT, linewidth=0.6)
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    if len(first) > 1:
        axes.legend(first.values(), first.keys(), loc="lower right", fontsize=10, frameon=False)


def _ratios(result: Mapping[str, Any]) -> list[float]:
    """The smoothed S over the setpoint in force, which older trajectories do not have."""
    target = result["cell"]["setpoint"]
    return [point[2] / (point[4] if len(point) > 4 else target) for point in result["trajectory"]]
