"""What the charts of the report draw: the columns of a history, thinned where it is long, as JSON."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from granite_scu.viz.run_folder import BAND, Run

MAX_TICKS = 4000
"""Ticks that the report draws at most: it stays a small file, and no screen has more columns of pixels."""

COLUMNS = ("s", "s_ema", "s_target", "lambda", "data_bpt", "param_bpt", "tokens_per_s")
_DECISIVE = ("s", "s_ema", "lambda", "data_bpt")
_DRIFT = ("drift", "drift_target")
"""Columns of a run that held drift."""
_DIGITS = 6
_FAR = 10
"""Times the least loss."""


def chart_data(run: Run) -> dict[str, Any]:
    """The data block of the page: JSON values only, null where there is no measurement.

    Returns:
        ``steps``, ``tokens`` and each of ``columns`` have one entry a drawn tick; ``marks`` has the places in them of
        the ticks that were at a bound or held; ``validations`` has (step, bits per token); ``ticks`` is
        the number of ticks recorded; ``charts`` says what to draw.
    """
    kept = thinned(run)
    columns = {name: run.column(name)[kept] for name in COLUMNS}
    if run.holds_drift:
        columns |= {name: run.column(name)[kept] for name in _DRIFT}
    return {
        "steps": run.column("step")[kept].astype(int).tolist(),
        "tokens": [int(value) if math.isfinite(value) else None for value in run.column("tokens")[kept]],
        "columns": {name: _numbers(values) for name, values in columns.items()},
        "marks": {name: np.flatnonzero(run.column(name)[kept] == 1).tolist() for name in ("saturated", "held")},
        "validations": [[step, _number(value)] for step, value in run.validations],
        "ticks": len(run.history),
        "band": BAND,
        "charts": _charts(run),
    }


def thinned(run: Run) -> np.ndarray:
    """(kept,) indices of the ticks to draw: all, or of each stretch those where S, lambda, DataBPT or held drift is
    extreme, and the first where one of them was not measured, for the line to have a gap there."""
    ticks = len(run.history)
    if ticks <= MAX_TICKS:
        return np.arange(ticks)
    kept, decisive = {0, ticks - 1}, (*_DECISIVE, *(_DRIFT[:1] if run.holds_drift else ()))
    stretches = np.array_split(np.arange(ticks), MAX_TICKS // (3 * len(decisive)) - 1)
    for name in decisive:
        values = run.column(name)
        for stretch in stretches:
            measured = np.isfinite(values[stretch])
            there = stretch[measured]
            if there.size:
                kept |= {int(there[values[there].argmin()]), int(there[values[there].argmax()])}
            kept.update(stretch[~measured][:1].tolist())
    return np.array(sorted(kept))


def _charts(run: Run) -> list[dict[str, Any]]:
    """Each: a title, the format of its numbers, the scale, and its series by column, form and colour."""
    target = run.uses_setpoint
    title = "S against its setpoint S*" if target else "S"
    s = [
        _series("S at each tick", "s", "line", "sky"),
        _series("S smoothed", "s_ema", "line", "blue"),
        *([_series("S*", "s_target", "since", "green", band=True)] if target else []),
    ]
    validated = " and validation" if run.validations else ""
    loss = [_series("training text", "data_bpt", "line", "sky"), _series("validation", "", "points", "ink")]
    return [
        _chart("data_bpt", f"Loss (DataBPT){validated}", "bits per token", "number", _scale_of_loss(run), loss),
        *(_drift_charts(run) if run.holds_drift else []),
        _chart("s", title, "share of bits", "percent", "auto", s),
        _chart(
            "lambda", "Regularisation strength λ", "no unit", "number", "log",
            [_series("λ", "lambda", "until", "vermilion", marks=True)],
            "λ = 0 throughout: nothing was steered." if (run.column("lambda") == 0).any() else "λ was not recorded.",
        ),
        _chart(
            "param_bpt", "ParamBPT, the adapter", "bits per token", "number", "auto",
            [_series("ParamBPT", "param_bpt", "line", "purple")],
        ),
        _chart(
            "tokens_per_s", "Throughput", "tokens per second", "number", "zero",
            [_series("tokens/s", "tokens_per_s", "line", "orange")],
        ),
    ]  # fmt: skip


def _scale_of_loss(run: Run) -> str:
    """Logarithmic where it falls to less than a tenth, of which a linear axis would show the beginning alone."""
    bits = run.column("data_bpt")
    bits = bits[bits > 0]
    return "log" if bits.size and bits.max() > _FAR * bits.min() else "linear"


def _drift_charts(run: Run) -> Iterator[dict[str, Any]]:
    """The run as a path, what it learned against how far it drifted; and drift over its steps."""
    whole = run.drift_path
    some = (
        whole if len(whole) <= MAX_TICKS else [whole[k] for k in np.linspace(0, len(whole) - 1, MAX_TICKS, dtype=int)]
    )
    label, colour = ("validation", "blue") if run.validates_drift else ("training text", "sky")
    yield _chart(
        "learned", "Learned against drifted", "bits per token, over drift in % of the base's bits", "number", "linear",
        [_series(label, "", "line", colour)],
    ) | {
        "path": [[step, _number(drift), _number(bits)] for step, drift, bits in some],
        "budget": _number(run.history[-1].get("drift_target") or math.nan),
        "kept": run.kept_step,
        "keptPoint": next(([_number(drift), _number(bits)] for drift, bits in run.kept_places), None),
    }  # fmt: skip
    yield _chart(
        "drift", "Drift", "% of the base's bits on general text", "percent", "auto",
        [_series("drift at each tick", "drift", "line", "blue"),
         _series("at most", "drift_target", "since", "green")],
    )  # fmt: skip


def _chart(
    name: str, title: str, unit: str, numbers: str, scale: str, series: list[dict], empty: str = ""
) -> dict[str, Any]:
    words = empty or "Not measured at any tick."
    return {
        "name": name, "title": title, "unit": unit, "numbers": numbers, "scale": scale, "series": series, "empty": words
    }  # fmt: skip


def _series(label: str, column: str, form: str, colour: str, band: bool = False, marks: bool = False) -> dict[str, Any]:
    """Points are the validations."""
    return {"label": label, "column": column, "form": form, "colour": colour, "band": band, "marks": marks}


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
