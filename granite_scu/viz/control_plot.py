"""How a run was steered: S against its setpoint, and the lambda that the controller chose."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from granite_scu.control.units import per_cent
from granite_scu.viz import style
from granite_scu.viz.run_folder import BAND, Run


def plot_control(run: Run) -> Figure:
    """Panels over the optimizer steps: S, raw and smoothed, with its setpoint, or drift with its budget; and lambda."""
    figure = style.canvas((8, 6.4))
    panels = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes, draw in zip(panels, (draw_drift if run.holds_drift else draw_s, draw_lambda), strict=True):
        draw(axes, run)
        style.tidy(axes)
        axes.tick_params(axis="x", length=0)
    panels[-1].tick_params(axis="x", length=3.5)
    style.over_steps(panels[-1], run.column("step").max())
    figure.align_ylabels()
    figure.suptitle(run.title, x=0.99, ha="right", fontsize=style.LEGEND, color=style.INK)
    return style.fit(figure)


def draw_s(axes: Axes, run: Run) -> None:
    """S, raw and smoothed, against its setpoint."""
    steps, raw, smoothed, target = (run.column(field) for field in ("step", "s", "s_ema", "s_target"))
    marker = style.marker(steps)
    axes.plot(steps, raw, color=style.SKY, linewidth=1.2, marker=marker, label="S at each tick")
    axes.plot(steps, smoothed, color=style.BLUE, linewidth=2.4, marker=marker, label="S smoothed")
    if np.isfinite(target).any():
        last = target[np.isfinite(target)][-1]
        now, band = per_cent(last), per_cent(BAND)
        draw_setpoint(axes, steps, target, style.GREEN, f"S* = {now}, band ± {band} of it")
    style.share_scale(axes, np.concatenate([raw, smoothed, target]))
    style.in_percent(axes)
    axes.set_ylabel("S (share of bits)", fontsize=style.LABEL, color=style.INK)
    style.legend_above(axes)


def draw_drift(axes: Axes, run: Run) -> None:
    """Drift, on the text that steers and, of the adapter that is kept, on held-out text, against its budget."""
    steps, drift, budget = (run.column(field) for field in ("step", "drift", "drift_target"))
    marker = style.marker(steps)
    axes.plot(steps, drift, color=style.BLUE, linewidth=2.4, marker=marker, label="drift at each tick")
    held_out = [share for share in [run.kept_drift] if share is not None]
    if held_out:
        axes.plot([run.kept_step], held_out, "o", color=style.INK, label="kept, on held-out text")
    draw_setpoint(axes, steps, budget, style.GREEN, f"at most {per_cent(budget[-1])}", band=False)
    style.share_scale(axes, np.concatenate([drift, held_out, budget]))
    style.in_percent(axes)
    axes.set_ylabel("drift (of the base's bits)", fontsize=style.LABEL, color=style.INK)
    style.legend_above(axes)


def draw_setpoint(
    axes: Axes, steps: np.ndarray, target: np.ndarray, colour: Any, label: str = "_S*", band: bool = True
) -> None:
    """The setpoint at each tick, and the band around one that S was to hold."""
    # A record's setpoint held since the record before it, the first one's since the start of the run.
    since, held = np.concatenate([[0], steps]), np.concatenate([target[:1], target])
    if band:
        axes.fill_between(since, (1 - BAND) * held, (1 + BAND) * held, step="pre", color=colour, alpha=0.2, linewidth=0)
    axes.plot(since, held, color=colour, linewidth=1.8, dashes=(5, 3), drawstyle="steps-pre", label=label)


def draw_lambda(axes: Axes, run: Run) -> None:
    """Lambda on a logarithmic axis, with the ticks at which it stood at a bound or was held."""
    steps, lam = run.column("step"), run.column("lambda")
    axes.set_ylabel("λ (no unit)", fontsize=style.LABEL, color=style.INK)
    positive = lam[lam > 0]
    if not positive.size:
        style.say(axes, "λ = 0 throughout: nothing is steered" if np.isfinite(lam).any() else "λ was not recorded")
        axes.set_yticks([])
        return
    lam = np.where(lam > 0, lam, np.nan)  # a logarithmic axis has no place for 0
    style.log_scale(axes, positive)
    marker = style.marker(steps)
    # lambda stays as it is from one tick to the next.
    axes.plot(steps, lam, color=style.VERMILION, linewidth=2.0, drawstyle="steps-post", marker=marker, label="λ")
    saturated, held = (run.column(field) == 1 for field in ("saturated", "held"))
    _mark(axes, steps[saturated], lam[saturated], "at a bound", "v", style.ORANGE)
    _mark(axes, steps[held], lam[held], "held", "o", "white")
    if saturated.any() or held.any():
        style.legend_above(axes)


def _mark(axes: Axes, steps: np.ndarray, values: np.ndarray, label: str, marker: str, colour: str) -> None:
    if steps.size:
        axes.plot(steps, values, marker, label=label, markersize=7, color=colour, markeredgecolor=style.INK)
