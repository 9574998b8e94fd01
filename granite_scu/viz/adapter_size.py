"""What size held-out and training text would have an adapter: as a sentence, and how much of its course to draw."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from granite_scu.viz.words import is_number

FIELDS = ("best_scale", "best_scale_error", "best_scale_training")
"""Fields of a tick's record: the factor that held-out text would have the adapter scaled by, its standard error, and
the factor of the training text. Any may be null."""

_UNSURE = 0.25
"""Standard error beyond which a factor that is within it of 1 shows nothing."""
_TIMES = 3.0
"""Factor from which it is printed as a factor, and not in per cent."""
_RISING = 0.1
"""Share of a run, its first, in which the factors may leave the picture: little is known of them yet."""
_MIN_RANGE = 0.05


def describe(record: Mapping[str, Any]) -> str | None:
    """What size the texts would have the adapter, as a clause; None where neither was asked.

    >>> describe({"best_scale": 1.08, "best_scale_error": 0.03, "best_scale_training": 1.6})
    'held-out text would have the adapter 8 % larger (± 3 %), the training text 60 % larger'

    Args:
        record: of a tick, or of anything that has its ``FIELDS``.
    """
    if FIELDS[0] not in record:
        return None
    scale, error, training = (record.get(name) for name in FIELDS)
    held_out = _held_out(scale, error)
    if training is None:
        return held_out
    if _change(training, None) is None:
        return f"{held_out}, the training text finds it about the right size"
    would = "" if " would " in held_out else " would have it"
    return f"{held_out}, the training text{would} {_change(training, None)}"


def _held_out(scale: float | None, error: float | None) -> str:
    if scale is None:
        return "held-out text does not tell what size the adapter should have"
    sure, change = _plus_minus(scale, error), _change(scale, error)
    if change is not None and (error is None or abs(scale - 1) > error):
        return f"held-out text would have the adapter {change}{sure}"
    if error is not None and error > _UNSURE:
        return "held-out text does not tell whether the adapter should be larger or smaller"
    return f"held-out text finds the adapter about the right size{sure}"


def _plus_minus(scale: float, error: float | None) -> str:
    if error is None:
        return ""
    return f" (± {_two_figures(error)})" if scale >= _TIMES else f" (± {_percent(max(error, 0.001), error)})"


def _change(scale: float, error: float | None) -> str | None:
    """From the size that it has; None where what would be written is 0."""
    if scale == 0:
        return "removed"
    if scale >= _TIMES:
        return f"{_two_figures(scale)} times as large"
    number = _percent(abs(scale - 1), error)
    if not float(number.split()[0]):
        return None
    return f"{number} {'larger' if scale > 1 else 'smaller'}"


def _two_figures(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def _percent(value: float, error: float | None) -> str:
    """In whole per cent, or in tenths where the error is that small."""
    return f"{100 * value:.{1 if error is not None and error < 0.005 else 0}f} %"


def label(change: float) -> str:
    """A change of size, beside an axis: per cent up to ten times, then a factor. No adapter is less than removed.

    >>> label(0.0), label(0.05), label(-0.2), label(-1.0), label(20.0), label(-2.0)
    ('right size', '5 % larger', '20 % smaller', 'removed', '20 times larger', '')
    """
    if abs(change) < 5e-5:
        return "right size"
    if change <= -1:
        return "removed" if change == -1 else ""
    if change >= 10:
        return f"{change:,.0f} times larger"
    return f"{float(f'{100 * abs(change):.3g}'):,g} % {'larger' if change > 0 else 'smaller'}"


def limits(history: Sequence[Mapping[str, Any]], training: bool = True) -> tuple[float, float]:
    """From where to where the change of size that the texts would have is drawn, 0 within it.

    What the start shows may leave the picture, and a wide error does not squeeze the lines.

    Args:
        history: the records of a run.
        training: whether the training text is drawn too.
    """
    settled = history[int(_RISING * len(history)) :]
    changes = _changes(settled, FIELDS[0]) + (_changes(settled, FIELDS[2]) if training else [])
    low, high = min([0.0, *changes]), max([0.0, *changes])
    room = max(high - low, _MIN_RANGE)
    edges = [
        record[FIELDS[0]] - 1 + sign * record[FIELDS[1]]
        for record in settled
        if all(is_number(record.get(name)) for name in FIELDS[:2])
        for sign in (-1, 1)
    ]
    low = max(min([low, *edges]), low - room / 2)
    high = min(max([high, *edges]), high + room / 2)
    low = max(low, -1.0)  # where it would be removed
    margin = max(0.08 * (high - low), (_MIN_RANGE - high + low) / 2)
    return low - margin, high + margin


def _changes(history: Iterable[Mapping[str, Any]], field: str) -> list[float]:
    return [record[field] - 1 for record in history if is_number(record.get(field))]
