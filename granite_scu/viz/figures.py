"""The figures of an ablation: one for each thing that a run measured, for one run or many.

Of runs that differ in their seed alone the line is the median, and the band goes from the least to the greatest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from granite_scu.control.units import per_cent
from granite_scu.viz import style
from granite_scu.viz.control_plot import draw_lambda, draw_s, draw_setpoint
from granite_scu.viz.groups import Course, Group
from granite_scu.viz.run_folder import BAND, Run

_SIZE = (8, 5.2)
_LEAST = 4.2
"""Inches of a panel under so many names that the figure is taller than a screen."""
_MEAN = 20
"""The running mean of a course that is noise from tick to tick spans this part of its ticks."""


def plot_s(groups: Sequence[Group]) -> Figure:
    """S over the optimizer steps, against its setpoint."""
    figure, axes = _figure(groups)
    run = _only(groups)
    if run:
        draw_s(axes, run)
    else:
        setpoints = {group.label: group.course(_setpoint)[:2] for group in groups if _uses_setpoint(group)}
        alike = len({tuple(map(tuple, course)) for course in setpoints.values()}) == 1
        for group in groups:
            _draw(axes, group, _smoothed_s)
            if group.label in setpoints:
                # One setpoint for all is a matter of its own; else it takes the colour of what follows it.
                colour = style.GREEN if alike else group.colour
                draw_setpoint(axes, *setpoints[group.label], colour)
        values = np.concatenate([_smoothed_s(run)[1] for group in groups for run in group.runs])
        style.share_scale(axes, np.concatenate([values, *(setpoint[1] for setpoint in setpoints.values())]))
        style.in_percent(axes)
        axes.set_ylabel("S, smoothed (share of bits)", fontsize=style.LABEL, color=style.INK)
    return _finished(figure, axes, groups)


def plot_lambda(groups: Sequence[Group]) -> Figure:
    """Lambda over the optimizer steps, on a logarithmic axis."""
    figure, axes = _figure(groups)
    run = _only(groups)
    if run:
        draw_lambda(axes, run)
        return _finished(figure, axes, groups)
    steered = _steered(groups)
    for group in steered:
        _draw(axes, group, _lambda, drawstyle="steps-post")
    _log_scale(axes, [run.column("lambda") for group in steered for run in group.runs])
    axes.set_ylabel("λ (no unit)", fontsize=style.LABEL, color=style.INK)
    return _finished(figure, axes, groups, drawn=steered, missing="λ = 0")


def plot_data_bpt(groups: Sequence[Group]) -> Figure:
    """The bits per token that the training text costs, a running mean over the noise of its samples."""
    figure, axes = _figure(groups)
    run = _only(groups)
    if run:
        steps, values = run.column("step"), run.column("data_bpt")
        marker = style.marker(steps)
        axes.plot(steps, values, color=style.SKY, linewidth=1.2, marker=marker, label="DataBPT at each tick")
    for group in groups:
        _draw(axes, group, _mean_data_bpt, label="running mean" if run else None)
    axes.set_ylabel("DataBPT (bits per token)", fontsize=style.LABEL, color=style.INK)
    if run:
        style.legend_above(axes)
    return _finished(figure, axes, groups)


def plot_param_bpt(groups: Sequence[Group]) -> Figure:
    """The bits per token that describe the adapter."""
    figure, axes = _figure(groups)
    for group in groups:
        _draw(axes, group, lambda run: (run.column("step"), run.column("param_bpt")))
    style.share_scale(axes, np.concatenate([run.column("param_bpt") for group in groups for run in group.runs]))
    axes.set_ylabel("ParamBPT (bits per token)", fontsize=style.LABEL, color=style.INK)
    return _finished(figure, axes, groups)


def plot_phase(groups: Sequence[Group]) -> Figure:
    """Two planes: S over lambda, which is what the law moves in, and DataBPT over ParamBPT, which is what it trades."""
    figure = style.canvas((8, 5.0))
    left, right = figure.subplots(1, 2)
    steered = _steered(groups)
    for axes, shown, x, y in (
        (left, steered, _lambda, _smoothed_s),
        (right, groups, lambda run: (run.column("step"), run.column("param_bpt")), _mean_data_bpt),
    ):
        for group in shown:
            _draw_path(axes, group, x, y)
    _log_scale(left, [run.column("lambda") for group in steered for run in group.runs], "x")
    style.share_scale(left, np.concatenate([_smoothed_s(run)[1] for group in groups for run in group.runs]))
    style.in_percent(left)
    style.share_scale(right, np.concatenate([run.column("param_bpt") for group in groups for run in group.runs]), "x")
    held = [group for group in groups if _uses_setpoint(group)]
    for target in sorted({group.course(_setpoint)[1][-1] for group in held}):
        left.axhspan((1 - BAND) * target, (1 + BAND) * target, color=style.GREEN, alpha=0.15, linewidth=0)
        left.axhline(target, color=style.GREEN, linewidth=1.4, dashes=(5, 3))
        _draw_ratio(right, target)
    if not steered:
        style.say(left, "λ = 0")
    for axes, x, y in (
        (left, "λ (no unit)", "S, smoothed (share of bits)"),
        (right, "ParamBPT (bits per token)", "DataBPT (bits per token)"),
    ):
        style.tidy(axes)
        axes.set_xlabel(x, fontsize=style.LABEL, color=style.INK)
        axes.set_ylabel(y, fontsize=style.LABEL, color=style.INK)
    if right.get_xscale() == "linear":
        right.xaxis.set_major_locator(MaxNLocator(4))
    handles = [
        Line2D([], [], marker="o", linestyle="none", color=style.INK, markerfacecolor=face, label=word)
        for word, face in (("first tick", "white"), ("last tick", style.INK))
    ]
    if held:
        handles.append(Line2D([], [], color=style.GREEN, dashes=(5, 3), label="S*"))
    _legend(figure, groups, handles)
    return figure


def plot_learned(groups: Sequence[Group]) -> Figure:
    """What was learned against how far the model drifted: each run that held drift as a path, up to its budget."""
    figure, axes = _figure(groups)
    held = [group for group in groups if any(run.holds_drift for run in group.runs)]
    for group in held:
        _draw_path(axes, group, *(partial(_drift_path, column=column) for column in (1, 2)))
        for run in group.runs:
            for drift, bits in run.kept_places if run.holds_drift else ():
                _draw_ring(axes, drift, bits, group)
    runs = [run for group in held for run in group.runs if run.holds_drift]
    budgets = sorted({float(run.column("drift_target")[-1]) for run in runs})
    for budget in budgets:
        axes.axvline(budget, color=style.GREEN, linewidth=1.8, dashes=(5, 3))
    kept = (drift for run in runs for drift, _ in run.kept_places)
    farthest = max([*budgets, *kept, *(drift for run in runs for _, drift, _ in run.drift_path)])
    axes.set_xlim(0, 1.08 * farthest)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    style.in_percent(axes, "x")
    axes.set_xlabel("drift on general text (of the base's bits)", fontsize=style.LABEL, color=style.INK)
    validated = all(run.validates_drift for run in runs)
    what = "validation" if validated else "training text" if _only(groups) else "validation, or training text"
    axes.set_ylabel(f"{what} (bits per token)", fontsize=style.LABEL, color=style.INK)
    line = Line2D([], [], color=style.GREEN, dashes=(5, 3), label="at most " + ", ".join(map(per_cent, budgets)))
    shown = [line, _ring("kept")]
    if _only(groups):
        _legend(figure, groups, shown)
    return _finished(figure, axes, groups, shown, drawn=held, missing="drift not held")


def plot_validation(groups: Sequence[Group]) -> Figure:
    """Bits per token on the validation sample, and where it was best."""
    figure, axes = _figure(groups)
    validated = [group for group in groups if group.course(_validations)[0].size]
    for group in validated:
        steps, median, *_ = _draw(axes, group, _validations, marker="o", label="validation" if _only(groups) else None)
        best = int(median.argmin())
        label = f"best: {median[best]:.3f} at step {steps[best]:.0f}" if _only(groups) else "_best"
        _draw_ring(axes, steps[best], median[best], group, label)
    axes.set_ylabel("validation (bits per token)", fontsize=style.LABEL, color=style.INK)
    if _only(groups) and validated:
        style.legend_above(axes)
    return _finished(figure, axes, groups, [_ring("best")], drawn=validated, missing="never validated")


def plot_step_time(groups: Sequence[Group]) -> Figure:
    """Seconds an optimizer step: over the steps for one run, the spread of the ticks for several."""
    run = _only(groups)
    if run:
        figure, axes = _figure(groups)
        steps, seconds = _step_seconds(run)
        axes.plot(steps, seconds, color=style.BLUE, linewidth=1.6, marker=style.marker(steps), label="each tick")
        if np.isfinite(seconds).any():
            median = float(np.nanmedian(seconds))
            label = f"median {median:.3g} s"
            axes.axhline(median, color=style.VERMILION, linewidth=1.8, dashes=(5, 3), label=label)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("time of a step (s)", fontsize=style.LABEL, color=style.INK)
        style.legend_above(axes)
        return _finished(figure, axes, groups)
    figure = style.canvas((8, 1.6 + _height(groups)))
    axes = figure.subplots()
    for row, group in enumerate(groups):
        seconds = np.concatenate([_step_seconds(run)[1] for run in group.runs])
        drawn = axes.boxplot(
            seconds[np.isfinite(seconds)], positions=[row], orientation="horizontal", widths=0.55, whis=(5, 95),
            showfliers=False, manage_ticks=False, patch_artist=True,
        )  # fmt: skip
        drawn["boxes"][0].set(facecolor=group.colour, alpha=0.5, edgecolor=style.INK)
        drawn["medians"][0].set(color=style.INK, linewidth=2)
    _rows(axes, groups)
    axes.set_xlim(left=0)
    axes.set_xlabel(
        "time of an optimizer step (s)\nmedian, quartiles, 5th and 95th percentile of the ticks",
        fontsize=style.LEGEND,
        color=style.INK,
    )
    return figure


def plot_summary(groups: Sequence[Group]) -> Figure:
    """What came out: bits per token on held-out documents, S and lambda at the end; a line for each group."""
    figure = style.canvas((8, 2.3 + _height(groups)))
    scored, s, lam = figure.subplots(1, 3, sharey=True, width_ratios=(5, 3, 3))
    # The lone word of a panel stands where its data would; an axis of its own would mean nothing.
    for row, group in enumerate(groups):
        results = [run.metrics.get("adapter_test_bpt") for run in group.runs]
        _dots(
            scored, row, group, results, missing="no test" if any(run.metrics for run in group.runs) else "no summary"
        )
        _dots(s, row, group, [_smoothed_s(run)[1][-1] for run in group.runs], missing="none")
        if _uses_setpoint(group):
            target = group.course(_setpoint)[1][-1]
            s.plot([target] * 2, [row - 0.32, row + 0.32], color=style.GREEN, linewidth=2.5)
        ends = [run.column("lambda")[-1] for run in group.runs]
        _dots(lam, row, group, [end for end in ends if end > 0], missing="λ = 0" if 0.0 in ends else "none")
    targets = [group.course(_setpoint)[1][-1] for group in groups if _uses_setpoint(group)]
    style.share_scale(
        s, np.array([*(_smoothed_s(run)[1][-1] for group in groups for run in group.runs), *targets]), "x"
    )
    style.in_percent(s, "x")
    _log_scale(lam, [run.column("lambda")[-1:] for group in groups for run in group.runs], "x")
    for axes, label, where in ((scored, _tested(groups), "bits per token"), (s, "S at the end", "share of bits"),
                               (lam, "λ at the end", "no unit")):  # fmt: skip
        _rows(axes, groups)
        axes.set_title(label, fontsize=style.LEGEND, color=style.INK)
        axes.set_xlabel(where, fontsize=style.LEGEND, color=style.INK)
    _draw_base(scored, groups)
    scored.xaxis.set_major_locator(MaxNLocator(3))
    if any(map(_uses_setpoint, groups)):
        bar = Line2D([], [], color=style.GREEN, marker="|", markersize=14, markeredgewidth=2.5, linestyle="none")
        figure.legend([bar], ["S*"], loc="outside upper right", frameon=False, fontsize=style.LEGEND)
    return figure


FIGURES: dict[str, Callable[[Sequence[Group]], Figure]] = {
    "s": plot_s,
    "lambda": plot_lambda,
    "data_bpt": plot_data_bpt,
    "param_bpt": plot_param_bpt,
    "phase": plot_phase,
    "validation": plot_validation,
    "step_time": plot_step_time,
    "summary": plot_summary,
}
"""By the name of their files."""


def draw_figures(groups: Sequence[Group]) -> dict[str, Figure]:
    """All ``FIGURES``, and where any of the runs held drift, what was learned against it."""
    runs = [run for group in groups for run in group.runs]
    more = {"learned": plot_learned} if any(run.holds_drift for run in runs) else {}
    return {name: style.fit(plot(groups)) for name, plot in (FIGURES | more).items()}


# What is drawn.


def _smoothed_s(run: Run) -> Course:
    """S as the controller saw it; as measured where it smooths nothing."""
    smoothed, raw = run.column("s_ema"), run.column("s")
    return run.column("step"), np.where(np.isfinite(smoothed), smoothed, raw)


def _mean_data_bpt(run: Run) -> Course:
    """DataBPT, each tick the mean of those around it that were measured."""
    values = run.column("data_bpt")
    half = len(values) // (2 * _MEAN)
    windows = (values[max(0, k - half) : k + half + 1] for k in range(len(values)))
    means = [np.mean(window[np.isfinite(window)]) if np.isfinite(window).any() else np.nan for window in windows]
    return run.column("step"), np.array(means)


def _drift_path(run: Run, column: int) -> Course:
    """Drift (column 1) or bits (2) along the path of a run that held drift."""
    path = np.array(run.drift_path if run.holds_drift else (), dtype=float).reshape(-1, 3)
    return path[:, 0], path[:, column]


def _validations(run: Run) -> Course:
    steps, values = zip(*run.validations, strict=True) if run.validations else ((), ())
    return np.array(steps, dtype=float), np.array(values, dtype=float)


def _step_seconds(run: Run) -> Course:
    """Seconds an optimizer step, from the tokens since the tick before and their rate."""
    steps, tokens, rate = (run.column(name) for name in ("step", "tokens", "tokens_per_s"))
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.diff(tokens, prepend=0) / rate / np.diff(steps, prepend=0)
    return steps, np.where(np.isfinite(seconds), seconds, np.nan)


def _setpoint(run: Run) -> Course:
    return run.column("step"), run.column("s_target")


def _uses_setpoint(group: Group) -> bool:
    return any(run.uses_setpoint for run in group.runs)


def _lambda(run: Run) -> Course:
    """Lambda where it is positive: a logarithmic axis has no place for 0."""
    lam = run.column("lambda")
    return run.column("step"), np.where(lam > 0, lam, np.nan)


def _steered(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if any((run.column("lambda") > 0).any() for run in group.runs)]


def _only(groups: Sequence[Group]) -> Run | None:
    """The run, where there is one only."""
    return groups[0].runs[0] if len(groups) == 1 and len(groups[0].runs) == 1 else None


# How it is drawn.


def _figure(groups: Sequence[Group]) -> tuple[Figure, Axes]:
    """One panel over the optimizer steps."""
    figure = style.canvas(_SIZE)
    axes = figure.subplots()
    style.over_steps(axes, max(run.column("step").max() for group in groups for run in group.runs))
    return figure, axes


def _finished(
    figure: Figure,
    axes: Axes,
    groups: Sequence[Group],
    more: Sequence[Line2D] = (),
    drawn: Sequence[Group] | None = None,
    missing: str = "",
) -> Figure:
    """The frame and the names; of those that are not ``drawn`` with what is ``missing``."""
    style.tidy(axes)
    if drawn is not None and not drawn:
        style.say(axes, missing)
    if _only(groups):
        figure.suptitle(groups[0].runs[0].title, x=0.99, ha="right", fontsize=style.LEGEND, color=style.INK)
    else:
        _legend(figure, groups, more, {each.label: missing for each in groups if drawn and each not in drawn})
    return figure


def _legend(
    figure: Figure, groups: Sequence[Group], more: Sequence[Line2D] = (), missing: Mapping[str, str] | None = None
) -> None:
    """Above the panels, in as many columns as the longest name leaves room for; the figure grows by its lines."""
    missing = missing or {}
    handles = []
    for each in groups:
        words = f"{each.label}: {missing[each.label]}" if each.label in missing else each.label
        handles.append(Line2D([], [], color=each.colour, linewidth=2.6, dashes=each.dashes, label=words))
    handles += more
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(4, 78 // (longest + 6)))
    lines = 0.28 * (-(-len(handles) // columns) - 1)
    figure.set_figheight(min(figure.get_figheight() + lines, max(style.TALLEST, lines + _LEAST)))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=style.LEGEND,
        labelcolor=style.INK,
        handlelength=2.2,
        columnspacing=1.4,
    )


def _draw(
    axes: Axes, group: Group, of: Callable[[Run], Course], label: str | None = None, **more: object
) -> tuple[np.ndarray, ...]:
    steps, median, low, high = group.course(of)
    if len(group.runs) > 1:
        step = "post" if more.get("drawstyle") == "steps-post" else None
        axes.fill_between(steps, low, high, step=step, color=group.colour, alpha=0.2, linewidth=0)
    line = {"color": group.colour, "linewidth": 2.2, "dashes": group.dashes, "marker": style.marker(steps)} | more
    axes.plot(steps, median, label=label or group.label, **line)
    return steps, median, low, high


def _draw_path(axes: Axes, group: Group, x: Callable[[Run], Course], y: Callable[[Run], Course]) -> None:
    """The medians against one another, at the steps that have both, with the first and the last."""
    (x_steps, across, *_), (y_steps, up, *_) = group.course(x), group.course(y)
    _, at, also = np.intersect1d(x_steps, y_steps, return_indices=True)
    across, up = across[at], up[also]
    axes.plot(across, up, color=group.colour, linewidth=1.8, dashes=group.dashes, label=group.label)
    for place, face in ((0, "white"), (-1, group.colour)):
        if len(across):
            axes.plot(across[place], up[place], "o", color=group.colour, markerfacecolor=face, markersize=8, zorder=5)


def _draw_ring(axes: Axes, x: float, y: float, group: Group, label: str | None = None) -> None:
    ring = {"markersize": 13, "markerfacecolor": "none", "markeredgewidth": 2, "linestyle": "none"}
    axes.plot(x, y, "o", color=group.colour, label=label, **ring)


def _ring(label: str) -> Line2D:
    """What such a ring is called in the legend."""
    return Line2D([], [], marker="o", markersize=11, linestyle="none", color=style.INK, markerfacecolor="none",
                  label=label)  # fmt: skip


def _draw_ratio(axes: Axes, target: float) -> None:
    """Where ParamBPT / (DataBPT + ParamBPT) is the setpoint."""
    low, high = axes.get_ylim()
    data = np.linspace(low, high, 50)
    axes.autoscale(False)
    axes.plot(data * target / (1 - target), data, color=style.GREEN, linewidth=1.4, dashes=(5, 3), label="S*")


def _tested(groups: Sequence[Group]) -> str:
    """What the scores are of: validation documents where a run had no others held out."""
    doubled = {bool(run.metrics.get("test_is_validation")) for group in groups for run in group.runs if run.metrics}
    return {True: "validation documents", False: "held-out documents"}[min(doubled, default=False)]


def _draw_base(axes: Axes, groups: Sequence[Group]) -> None:
    """The base model on the same documents: a line, or words where it would squeeze the rest."""
    bases = {run.metrics.get("base_test_bpt") for group in groups for run in group.runs} - {None}
    results = [run.metrics.get("adapter_test_bpt") for group in groups for run in group.runs]
    results = [result for result in results if result is not None]
    if len(bases) != 1 or not results:
        return
    base, least, most = bases.pop(), min(results), max(results)
    if _only(groups) or base - least < 3 * (most - least):
        axes.axvline(base, color=style.INK, linewidth=1.4, dashes=(2, 2))
        low, high = axes.get_xlim()
        left = base > (low + high) / 2
        axes.annotate(
            f"base {base:.3f}", (base, 1), xycoords=("data", "axes fraction"), xytext=(-4 if left else 4, -3),
            textcoords="offset points", ha="right" if left else "left", va="top", fontsize=style.LEGEND,
            color=style.INK,
        )  # fmt: skip
    else:
        axes.set_xlabel(f"bits per token; base {base:.3f}", fontsize=style.LEGEND, color=style.INK)


def _dots(axes: Axes, row: int, group: Group, values: Sequence[float | None], missing: str) -> None:
    there = [value for value in values if value is not None and np.isfinite(value)]
    if not there:
        axes.annotate(
            missing, (0.04, row), xycoords=("axes fraction", "data"), va="center", fontsize=style.LEGEND,
            color=style.INK,
        )  # fmt: skip
        return
    axes.plot([min(there), max(there)], [row, row], color=group.colour, linewidth=1.5)
    axes.plot(there, [row] * len(there), "o", color=group.colour, markersize=5)
    axes.plot(np.median(there), row, "o", color=group.colour, markersize=10, markeredgecolor=style.INK, label="median")


def _height(groups: Sequence[Group]) -> float:
    """Inches of a row for each group: as far apart as a screen has room for, but never one over another."""
    return max(min(0.45 * len(groups), style.TALLEST - 2.3), 0.22 * len(groups))


def _rows(axes: Axes, groups: Sequence[Group]) -> None:
    style.tidy(axes, style.LEGEND)
    axes.set_yticks(range(len(groups)), [group.label for group in groups])
    axes.set_ylim(len(groups) - 0.4, -0.8)
    axes.tick_params(axis="y", length=0)


def _log_scale(axes: Axes, values: Sequence[np.ndarray], which: str = "y") -> None:
    every = np.concatenate([np.empty(0), *values])
    if (every > 0).any():
        style.log_scale(axes, every[every > 0], which)
