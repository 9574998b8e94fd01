"""How a run was steered: S against its setpoint, and the lambda that the controller chose.

    python -m viz.control_plot RUN [--out DIR]

writes ``control.png`` and ``control.svg`` into the run folder, or into DIR.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from viz import style
from viz.run_folder import BAND, Run, read_measured_run


def plot_control(run: Run) -> Figure:
    """Two panels over the optimizer steps: S, raw and smoothed, with the setpoint's band; and lambda."""
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    draw_s(above, run)
    draw_lambda(below, run)
    for axes in (above, below):
        style.tidy(axes)
    below.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    below.set_xlim(0, 1.01 * run.column("step").max())
    above.tick_params(axis="x", length=0)
    below.set_xlabel("optimizer steps", fontsize=style.LABEL, color=style.INK)
    figure.align_ylabels()
    figure.suptitle(run.title, x=0.99, ha="right", fontsize=style.LEGEND, color=style.INK)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m viz.control_plot", description="Draw how a run was steered.")
    parser.add_argument("run", metavar="RUN", help="run folder, finished or not")
    parser.add_argument("--out", metavar="DIR", help="folder for control.png and control.svg (default: RUN)")
    options = parser.parse_args(arguments)
    folder = options.out or options.run
    return style.draw_to(folder, "control", lambda: plot_control(read_measured_run(options.run)))


def draw_s(axes: Axes, run: Run) -> None:
    """S, raw and smoothed, against its setpoint."""
    steps, raw, smoothed, target = (run.column(field) for field in ("step", "s", "s_ema", "s_target"))
    marker = "o" if len(steps) == 1 else None  # a line through one point would not be seen
    axes.plot(steps, raw, color=style.SKY, linewidth=1.2, marker=marker, label="S at each tick")
    axes.plot(steps, smoothed, color=style.BLUE, linewidth=2.4, marker=marker, label="S smoothed")
    if np.isfinite(target).any():
        last = target[np.isfinite(target)][-1]
        label = f"S* = {last:g} ± {BAND:.0%}".replace("%", " %")
        draw_band(axes, steps, target, style.GREEN, label)
    style.share_scale(axes, np.concatenate([raw, smoothed, target]))
    axes.set_ylabel("S (ratio of bits)", fontsize=style.LABEL, color=style.INK)
    style.legend_above(axes)


def draw_band(axes: Axes, steps: np.ndarray, target: np.ndarray, colour: Any, label: str = "_S*") -> None:
    """The setpoint at each tick, and the band around it."""
    # A record's setpoint held since the record before it, the first one's since the start of the run.
    since, held = np.concatenate([[0], steps]), np.concatenate([target[:1], target])
    axes.fill_between(since, (1 - BAND) * held, (1 + BAND) * held, step="pre", color=colour, alpha=0.2, linewidth=0)
    axes.plot(since, held, color=colour, linewidth=1.8, dashes=(5, 3), drawstyle="steps-pre", label=label)


def draw_lambda(axes: Axes, run: Run) -> None:
    """Lambda on a logarithmic axis, with the ticks at which it stood at a bound or was held."""
    steps, strength = run.column("step"), run.column("lambda")
    axes.set_ylabel("λ (no unit)", fontsize=style.LABEL, color=style.INK)
    positive = strength[strength > 0]
    if not positive.size:
        note = "λ = 0 throughout: nothing is steered" if np.isfinite(strength).any() else "λ was not recorded"
        axes.text(
            0.5, 0.5, note, transform=axes.transAxes, ha="center", va="center", fontsize=style.LABEL, color=style.INK
        )
        axes.set_yticks([])
        return
    strength = np.where(strength > 0, strength, np.nan)  # a logarithmic axis has no place for 0
    style.log_scale(axes, positive)
    marker = "o" if len(steps) == 1 else None
    # lambda stays as it is from one tick to the next.
    axes.plot(steps, strength, color=style.VERMILION, linewidth=2.0, drawstyle="steps-post", marker=marker, label="λ")
    saturated, held = (run.column(field) == 1 for field in ("saturated", "held"))
    _mark(axes, steps[saturated], strength[saturated], "at a bound", "v", style.ORANGE)
    _mark(axes, steps[held], strength[held], "held", "o", "white")
    if saturated.any() or held.any():
        style.legend_above(axes)


def _mark(axes: Axes, steps: np.ndarray, values: np.ndarray, label: str, marker: str, colour: str) -> None:
    if steps.size:
        axes.plot(steps, values, marker, label=label, markersize=7, color=colour, markeredgecolor=style.INK)


if __name__ == "__main__":
    sys.exit(main())
