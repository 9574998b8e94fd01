"""The chart of ``benchmarks/drift.py``: what was learned over what was lost, a curve an arm."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.drift_grid import saved
from granite_scu.storage.atomic import replacing
from granite_scu.viz import style

_LOOKS = {
    "plain": (style.VERMILION, "o"), "plain, scaled": (style.ORANGE, "v"), "plain, averaged": (style.ORANGE, "P"),
    "replay": (style.PURPLE, "X"), "inputs": (style.GREY, "^"), "size": (style.GREEN, "D"), "fixed": (style.SKY, "s"),
    "loop": (style.BLUE, "o"),
}  # fmt: skip
_NAMES = {
    "plain": "plain, at its checkpoints", "plain, scaled": "plain, scaled", "plain, averaged": "plain, averaged",
    "replay": "general text replayed", "inputs": "drift on its own records (LwF)", "size": "S held",
    "fixed": "lambda times drift", "loop": "drift held",
}  # fmt: skip

Line = dict[str, Any]
Points = list[tuple[Line, Line]]


def write(lines: list[Line], path: Path) -> None:
    """Draw the runs and write a PNG."""
    with style.as_designed(), replacing(path) as temporary:
        draw(lines).savefig(temporary, format="png", dpi=150)


def draw(lines: list[Line]) -> Figure:
    """Two panels a base and kind of data: bits saved over drift, and right answers, or bits again, over those lost."""
    lines = [line for line in lines if "failed" not in line]
    settings = sorted({(line["base"], line["data"], line["records"]) for line in lines})
    figure = Figure(figsize=(8, 1.2 + 3.2 * len(settings)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(settings), 2, squeeze=False)
    shown: dict[str, Any] = {}
    for (base, data, records), (by_drift, by_questions) in zip(settings, panels, strict=True):
        here = [line for line in lines if (line["base"], line["data"], line["records"]) == (base, data, records)]
        asked = all("right" in point for line in here for point in line["points"].values())
        for (arm, _), points in sorted(curves(here).items(), key=lambda curve: list(_LOOKS).index(curve[0][0])):
            colour, marker = _LOOKS[arm]
            look = {"color": colour, "marker": marker, "markersize": 6, "linewidth": 1.5, "alpha": 0.85}
            learned = [saved(line, point) for line, point in points]
            (shown[arm],) = by_drift.plot([point["drift"] for _, point in points], learned, **look)
            right = [point["right"] / point["questions"] for _, point in points] if asked else learned
            by_questions.plot([point["known_lost"] for _, point in points], right, **look)
        by_drift.set_xscale("log")
        by_drift.xaxis.set_major_locator(FixedLocator([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]))
        by_drift.xaxis.set_minor_locator(NullLocator())
        by_drift.set_xlabel("drift", fontsize=style.TICKS)
        by_drift.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        by_drift.set_ylabel("bits saved", fontsize=style.TICKS)
        by_questions.set(xlim=(0, None), ylim=(0, 1.04))
        by_questions.set_xlabel("general answers lost", fontsize=style.TICKS)
        by_questions.set_ylabel("own answers right" if asked else "bits saved", fontsize=style.TICKS)
        for axes in (by_drift, by_questions):
            axes.set_title(f"{base}, {records:,} {data}", fontsize=style.TICKS, loc="left")
            style.tidy(axes)
            style.in_percent(axes)
    figure.legend([shown[arm] for arm in _LOOKS if arm in shown], [_NAMES[arm] for arm in _LOOKS if arm in shown],
                  loc="outside upper center", ncols=2, frameon=False, fontsize=style.LEGEND)  # fmt: skip
    return figure


def curves(lines: list[Line]) -> dict[tuple[str, tuple], Points]:
    """Runs and their points by arm, and by all but the value of it, in the order of that; of a plain run in the order
    of training, and scaled by rising scale."""
    made: dict[tuple[str, tuple], Points] = {}
    for line in sorted(lines, key=lambda line: line["value"]):
        others = line["rate"], line["seed"], line["text"], line["epochs"]
        end = line["points"]["end"]
        for name, point in [*line["points"].items(), ("end", end)][1:]:
            arm = line["arm"]
            if name.startswith("x"):
                arm += ", scaled"
            elif name.startswith("mean"):
                arm += ", averaged"
            made.setdefault((arm, others), []).append((line, point))
    for (arm, _), points in made.items():
        if arm == "plain, scaled":
            points[:] = [*points[::-1], (points[0][0], points[0][0]["points"]["end"])]
    return made
