"""What ``identify`` found: the step test with the fitted model, and the step of S* as predicted and as measured.

    python -m research.identification.plot RUN [--out DIR]

writes ``identification.png`` and ``identification.svg`` into the folder, or into DIR.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from granite_scu.config.errors import UserError
from granite_scu.control.units import per_cent
from granite_scu.viz import style
from granite_scu.viz.run_folder import numbers
from research.drawing import draw_to

RESULT = "identification.json"


def read_identification(path: str | Path) -> dict[str, Any]:
    """The result of ``identify`` in a folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    file = Path(path) / RESULT
    if not file.is_file():
        raise UserError(f"{path}: has no {RESULT}; name the --run.output_dir of the step test")
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        result["model"], result["excitation"], result["verification"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{file}: is damaged ({error}); run identify again") from error
    return result


def plot_identification(result: dict[str, Any]) -> Figure:
    """Two panels over the ticks of the step test, lambda below S; and one for the step of S*, where it was tried."""
    tried = result["verification"] is not None
    figure = Figure(figsize=(8, style.TALLEST if tried else 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3 if tried else 2, 1, height_ratios=(3, 2, 3.4) if tried else (3, 2))
    _plot_fit(panels[0], result)
    _plot_strength(panels[1], result)
    panels[0].sharex(panels[1])
    panels[0].tick_params(axis="x", length=0, labelbottom=False)
    if tried:
        _plot_step(panels[2], result)
    for axes in panels:
        style.tidy(axes)
    figure.align_ylabels()
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m research.identification.plot", description="Draw what a step test found."
    )
    parser.add_argument("run", metavar="RUN", help="the --run.output_dir of the step test")
    parser.add_argument("--out", metavar="DIR", help="folder for identification.png and .svg (default: RUN)")
    options = parser.parse_args(arguments)
    folder = options.out or options.run
    return draw_to(folder, lambda: {"identification": plot_identification(read_identification(options.run))})


def _plot_fit(axes: Axes, result: dict[str, Any]) -> None:
    record, start = result["excitation"], result["fit"]["start"]
    seen, fitted = (np.exp(numbers(record[name])) for name in ("log_s", "log_s_fitted"))
    ticks = np.arange(1, len(seen) + 1)
    axes.plot(ticks, seen, color=style.SKY, linewidth=1.8, label="S measured")
    label = f"model, R² = {result['fit']['r2']:.2f}"
    axes.plot(ticks[start:], fitted[start:], color=style.BLUE, linewidth=2.0, dashes=(4, 2), label=label)
    axes.axhline(
        result["setpoint"],
        color=style.GREEN,
        linewidth=1.4,
        dashes=(5, 3),
        label=f"S* = {per_cent(result['setpoint'])}",
    )
    shown = np.concatenate([seen[start // 2 :], fitted[start:]])
    style.log_scale(axes, shown[shown > 0])
    style.in_percent(axes)
    axes.set_ylabel("S (share of bits)", fontsize=style.LABEL, color=style.INK)
    _mark_phases(axes, start)
    style.legend_above(axes)


def _plot_strength(axes: Axes, result: dict[str, Any]) -> None:
    record, start = result["excitation"], result["fit"]["start"]
    lam = np.exp(numbers(record["log_lambda"]))
    axes.plot(np.arange(1, len(lam) + 1), lam, color=style.VERMILION, linewidth=2.0, drawstyle="steps-post")
    style.log_scale(axes, lam[lam > 0])
    _mark_phases(axes, start)
    axes.text(0.01, 0.03, "closed loop", transform=axes.transAxes, fontsize=style.LEGEND, color=style.INK)
    axes.annotate(
        "open loop",
        (start + 1, 0.03),
        xycoords=("data", "axes fraction"),
        fontsize=style.LEGEND,
        color=style.INK,
        va="bottom",
    )
    axes.set_ylabel("λ (no unit)", fontsize=style.LABEL, color=style.INK)
    model = result["model"]
    words = (f"{sign} = {model[name]['value']:.2g} ± {model[name]['standard_error']:.1g}" for sign, name in _SIGNS)
    axes.set_xlabel(f"ticks of the step test    ({',  '.join(words)})", fontsize=style.LEGEND, color=style.INK)
    axes.set_xlim(0, 1.01 * len(lam))


_SIGNS = (("K", "gain"), ("τ", "tau"), ("θ", "theta"))


def _mark_phases(axes: Axes, start: int) -> None:
    axes.axvline(start, color=style.INK, linewidth=1.0, alpha=0.6)


def _plot_step(axes: Axes, result: dict[str, Any]) -> None:
    """S over its old setpoint, around the step of S*."""
    verification, gains = result["verification"], result["gains"]
    at, factor = verification["at"], result["step_test"]["step"]
    # As many ticks before the step as show how steady S was; the tick at 0 is the first that knew of the new S*.
    first = at // 2
    raw, smoothed = (np.exp(numbers(verification[name]))[first:] for name in ("log_s", "log_s_smoothed"))
    ticks = np.arange(first, first + len(raw)) - at
    axes.plot(ticks, raw / result["setpoint"], color=style.SKY, linewidth=1.2, label="S measured")
    axes.plot(ticks, smoothed / result["setpoint"], color=style.BLUE, linewidth=2.4, label="smoothed")
    predicted = factor ** numbers(verification["predicted"]["response"])
    after = np.arange(len(predicted))
    axes.plot(after, predicted, color=style.VERMILION, linewidth=2.0, dashes=(4, 2), label="predicted")
    target = np.where(ticks < 0, 1.0, factor)
    axes.plot(ticks, target, color=style.GREEN, linewidth=1.6, dashes=(5, 3), drawstyle="steps-post", label="S*")
    axes.set_ylabel("S / S* before", fontsize=style.LABEL, color=style.INK)
    words = f"Kp = {gains['kp']:.3g}, Ki = {gains['ki']:.3g}"
    axes.set_xlabel(f"ticks since S* stepped    ({words})", fontsize=style.LEGEND, color=style.INK)
    style.legend_above(axes, columns=4)


if __name__ == "__main__":
    sys.exit(main())
