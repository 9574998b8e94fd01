"""What the pictures have in common: their colours, their lettering, their axes, and how they are written."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from granite_scu.control.units import per_cent
from granite_scu.storage.atomic import replacing

log = logging.getLogger(__name__)

# Okabe and Ito's colours, which the common kinds of colour blindness keep apart; sky and orange darker than theirs, so
# that a line in any of them stands out from white by a contrast of 3 : 1 at least.
BLUE, SKY, VERMILION, ORANGE, GREEN, PURPLE = "#0072B2", "#3D97D3", "#D55E00", "#B87A00", "#009E73", "#CC79A7"
INK, GREY, FAINT = "#333333", "#777777", "#DDDDDD"
TALLEST = 9.0
"""Inches; a figure 8 inches wide is shown 800 pixels wide, and one that is taller than this does not fit a screen."""
# Points on a figure 8 inches wide, so that they can still be read at half that width.
LABEL, TICKS, LEGEND = 15, 13, 12.5
_TRIES = 8
_APART = 2.0
"""Pixels, of a hundred an inch, around each number of an axis that no other number may enter."""


@contextmanager
def as_designed() -> Iterator[None]:
    """Matplotlib's own defaults while a picture is drawn and written: nobody's matplotlibrc or style changes it."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["text.parse_math"] = False  # a dollar in a run's name begins no formula
        yield


@contextmanager
def drawing(what: str, command: str) -> Iterator[None]:
    """Around a picture, drawn as designed. Where a library fails at it, a warning says how to draw it later.

    Args:
        what: the picture.
        command: draws it later.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with as_designed():
            yield
    except OSError:
        raise
    except Exception as error:  # of any kind: all that counts is written already
        words = "%s could not be drawn (%s: %s), and all else is complete; draw it with: %s"
        log.warning(words, what, type(error).__name__, error, command)


def canvas(size: tuple[float, float]) -> Figure:
    """An empty figure of so many inches, which needs no window."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def over_steps(axes: Axes, last: float) -> None:
    """The axis of the optimizer steps, up to the last of them."""
    axes.set_xlim(0, 1.01 * last)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("optimizer steps", fontsize=LABEL, color=INK)


def say(axes: Axes, words: str) -> None:
    """In the middle of a panel that has nothing to show."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", fontsize=LABEL, color=INK)


def marker(steps: np.ndarray) -> str | None:
    """Of a line: one through a single point would not be seen."""
    return "o" if len(steps) == 1 else None


def tidy(axes: Axes, ticks: float = TICKS) -> None:
    """Two spines, a faint grid behind the data, and numbers of ``ticks`` points."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(labelsize=ticks, colors=INK)
    axes.grid(which="major", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def log_scale(axes: Axes, positive: np.ndarray, which: str = "y") -> None:
    """A logarithmic axis ("x" or "y") over the positive values, with numbers on it however few decades it spans."""
    beside = max(1.4, (positive.max() / positive.min()) ** 0.08)  # room for a dot, however many decades there are
    low, high = positive.min() / beside, positive.max() * beside
    if high < 8 * low:  # nearly constant: keep noise from filling the panel
        middle = np.sqrt(low * high)
        low, high = middle / np.sqrt(8), middle * np.sqrt(8)
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    decades = np.log10(high / low)
    # Numbers side by side need more room than one above the other.
    several, two = (1.0, 1.6) if which == "x" else (1.8, 3.5)
    subs = (1, 2, 5) if decades < several else (1, 3) if decades < two else (1,)
    axis = axes.xaxis if which == "x" else axes.yaxis
    most = 8 if which == "y" else 5 if decades < 4 else 3  # small numbers are long
    axis.set_major_locator(LogLocator(subs=subs, numticks=most))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def share_scale(axes: Axes, values: np.ndarray, which: str = "y") -> None:
    """For what starts at 0 and settles somewhere: linear from 0, logarithmic where it dwells in several decades."""
    positive = values[values > 0]
    if positive.size and positive.max() > 10 * np.quantile(positive, 0.2, method="lower"):
        # The first rise from 0 may leave the panel, but not what stays that low.
        least = min(positive.max() / 300, np.quantile(positive, 0.1) / 2)
        log_scale(axes, positive[positive > least], which)
    else:
        axes.set(**{f"{which}lim": (0, 1.08 * positive.max(initial=1e-6))})


def in_percent(axes: Axes, which: str = "y") -> None:
    """Have the numbers of an axis ("x" or "y") over shares in per cent. After its scale is set."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: per_cent(value)))


def legend_above(axes: Axes, columns: int = 3) -> None:
    """Above the panel, where it hides no data."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        fontsize=LEGEND,
        labelcolor=INK,
        borderaxespad=0.2,
        borderpad=0,
        handlelength=1.8,
        columnspacing=1.6,
    )


def fit(figure: Figure) -> Figure:
    """Have its words whole and apart, as drawn: narrower legends, a shorter title, fewer numbers at an axis."""
    numbered = [axis for axes in figure.axes if axes.get_visible() for axis in (axes.xaxis, axes.yaxis)]
    for _ in range(_TRIES):  # what is changed moves the rest
        figure.draw_without_rendering()
        if not any([_shorten_title(figure), *map(_narrow_legend, figure.axes), *map(_thin, numbered)]):
            break
    return figure


def _shorten_title(figure: Figure) -> bool:
    title = next((text for text in figure.texts if text.get_text() == figure.get_suptitle() != ""), None)
    if title is None or title.get_window_extent().x0 >= 0:
        return False
    words, room = title.get_text(), figure.bbox.width / title.get_window_extent().width
    half = int(0.95 * room * len(words)) // 2
    title.set_text(f"{words[:half]}…{words[-half:]}")
    return True


def _narrow_legend(axes: Axes) -> bool:
    legend = axes.get_legend()
    if legend is None or legend.get_window_extent().x1 <= axes.figure.bbox.x1:
        return False
    columns = len({round(text.get_window_extent().x0) for text in legend.get_texts()})
    if columns > 1:
        legend_above(axes, columns - 1)
    return columns > 1


def _thin(axis: Axis) -> bool:
    """Every second number of an axis whose numbers touch; powers of ten before others."""
    low, high = sorted(axis.get_view_interval())
    shown = [tick for tick in axis.get_major_ticks() if tick.label1.get_visible() and tick.label1.get_text()]
    there = [tick for tick in shown if low <= tick.get_loc() <= high]
    boxes = [Bbox.padded(tick.label1.get_window_extent(), _APART) for tick in there]
    if not any(Bbox.intersection(*pair) for pair in pairwise(boxes)):
        return False
    places = sorted(tick.get_loc() for tick in there)
    powers = [place for place in places if axis.get_scale() == "log" and np.isclose(np.log10(place) % 1, (0, 1)).any()]
    axis.set_major_locator(FixedLocator(powers if 2 <= len(powers) < len(places) else places[::2]))
    return True


def save(figure: Figure, path_stem: str | Path) -> list[Path]:
    """Write ``<path_stem>.png`` (150 dots an inch) and ``<path_stem>.svg``; the same figure gives the same bytes."""
    stem = Path(path_stem)
    png, svg = (stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg"))
    with replacing(png) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    with replacing(svg) as temporary, matplotlib.rc_context({"svg.hashsalt": stem.name}):
        figure.savefig(temporary, format="svg", metadata={"Date": None})
        temporary.write_text(_with_own_names(temporary.read_text(encoding="utf-8")), encoding="utf-8")
    return [png, svg]


def _with_own_names(svg: str) -> str:
    """The picture with its clip paths numbered: matplotlib names them after addresses, which no two draws share."""
    for number, name in enumerate(re.findall(r'<clipPath id="(\w+)"', svg)):
        svg = svg.replace(name, f"clip{number}")
    return svg
