"""Numbers and settings in words, as a page has them."""

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from granite_scu.control.units import per_cent

NONE = "\N{EN DASH}"
"""For what was not measured."""


def section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of that name, empty where there is none."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"group": {"name": value}}`` as pairs of ``group.name`` and value, however deep."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shown(value: object) -> str:
    """A setting in words; of an absolute path only the last name, for where it lay is nobody else's business."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, str) and (PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()):
        return "…/" + (PureWindowsPath(value) if "\\" in value else PurePosixPath(value)).name
    return str(value)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def quantity(value: Any) -> str:
    if not is_number(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def compact(value: Any) -> str:
    """As ``quantity``, in ten characters at most: what a tile has room for."""
    return f"{value:.3g}" if is_number(value) and abs(value) >= 1e7 else quantity(value)


def percent(value: Any) -> str:
    return per_cent(value).replace(" ", "\N{NO-BREAK SPACE}") if is_number(value) else NONE


def signed(change: float) -> str:
    """In per cent; from ten times more on as a factor."""
    if change >= 10:
        return f"{1 + change:,.0f} times as much"
    return f"{100 * change:+.1f}\N{NO-BREAK SPACE}%".replace("-", "\N{MINUS SIGN}")


def short(rate: float) -> str:
    """A learning rate to one figure, as people write it.

    >>> short(5e-4), short(0.03), short(2.5e-5)
    ('5e-4', '0.03', '3e-5')
    """
    return f"{rate:.1g}" if rate >= 0.01 else f"{rate:.0e}".replace("e-0", "e-")
