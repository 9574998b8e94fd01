"""What every picture keeps to: lines that can be seen on white, shares in per cent, no picture taller than a screen."""

import itertools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from folders import METRICS, course, finished_run, held_run, rising, settings, write_run
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from granite_scu.export import present
from granite_scu.viz import control_plot, style
from granite_scu.viz.control_plot import plot_control
from granite_scu.viz.figures import draw_figures
from granite_scu.viz.groups import group
from granite_scu.viz.run_folder import read_run

ROOT = Path(__file__).parents[2]
MIN_CONTRAST = 3.0
"""Contrast of a line on its ground: WCAG 2.2, criterion 1.4.11."""


def luminance(colour) -> float:
    """Relative, of red, green and blue from 0 to 1."""
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in colour]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(colour, ground="white") -> float:
    """Of a colour, with what shows through it, on a ground."""
    (*own, alpha), below = to_rgba(colour), to_rgba(ground)[:3]
    seen = [alpha * a + (1 - alpha) * b for a, b in zip(own, below, strict=True)]
    light, dark = sorted((luminance(seen), luminance(below)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def runs(place: Path):
    """Groups of six laws, each with five setpoints."""
    found = []
    for law, k in itertools.product(range(6), range(5)):
        asked = {"controller": f"law-{law}", "target_s": 0.02 * (k + 1)}
        found.append(write_run(place / f"law-{law}-{k}", rising(), asked, settings(control=asked), [(100, 6.1)]))
    return group(list(map(read_run, found)))


@pytest.fixture(scope="module")
def every_figure(tmp_path_factory) -> dict[str, Figure]:
    """Of one run, of many, and of one that held drift."""
    place = tmp_path_factory.mktemp("runs")
    finished, held = (read_run(make(place / make.__name__)) for make in (finished_run, held_run))
    return {
        "control": plot_control(finished),
        **{f"one {name}": figure for name, figure in draw_figures(group([finished])).items()},
        "held": plot_control(held),
        "learned": draw_figures(group([held]))["learned"],
        "several learned": draw_figures(group([held, finished]))["learned"],
        **{f"many {name}": figure for name, figure in draw_figures(runs(place)).items()},
    }


def words_of(figure: Figure) -> list[tuple[str, Bbox]]:
    """What can be read in a picture, and where: of an axis the numbers that are in sight."""
    figure.draw_without_rendering()
    found = list(figure.texts)
    for legend in [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]:
        found += legend.get_texts()
    for axes in filter(Axes.get_visible, figure.axes):
        found += [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [(text.get_text(), text.get_window_extent()) for text in found if text.get_visible() and text.get_text()]


LONG = "a-run-whose-name-" + "is-long-" * 9


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("run", 5e-7, 2e-6),
        (LONG, 1e-7, 1e4),
        *(
            pytest.param(name, *span, marks=pytest.mark.slow)
            for name, *span in [
                ("run", 0.2, 19.3), (LONG, 0.9, 1.1), ("run", 3e-7, 3e-7), ("run", 0.02, 0.021), ("run", 2e3, 9e3),
                ("run", 1e-5, 0.4),
            ]
        ),
    ],
)  # fmt: skip
def test_all_words_of_a_picture_are_whole_and_apart(tmp_path, name, low, high):
    asked = settings(control={"controller": "pi"})
    bits = {"base_test_bpt": 2 * high, "adapter_test_bpt": low}
    folder = write_run(
        tmp_path / name, course(low, high), {"controller": "pi", "target_s": None if low > 1 else 0.9}, asked,
        [(20, high), (40, low)], METRICS | bits,
    )  # fmt: skip
    run = read_run(folder)
    for what, figure in ({"control": plot_control(run)} | draw_figures(group([run]))).items():
        found, whole = words_of(figure), Bbox.padded(figure.bbox, 0.5)
        assert {text: box for text, box in found if not whole.contains(*box.min) or not whole.contains(*box.max)} == {}
        touching = [(a, b) for (a, one), (b, two) in itertools.combinations(found, 2) if crossing(one, two)]
        assert touching == [], what
        below = figure.axes[-1].xaxis
        assert len([each for each in below.get_ticklocs() if np.clip(each, *below.get_view_interval()) == each]) > 1


def crossing(one: Bbox, two: Bbox) -> bool:
    """Whether letters of two texts share a place; a box has a pixel of air at each of its edges."""
    shared = Bbox.intersection(one, two)
    return shared is not None and min(shared.width, shared.height) > 2


def test_every_line_and_point_can_be_seen_on_white(every_figure):
    seen = {
        (name, str(colour)): contrast(colour)
        for name, figure in every_figure.items()
        for axes in figure.axes
        for line in axes.get_lines()
        for colour in [to_rgba(line.get_color(), line.get_alpha())]
    }
    assert len(seen) > 40
    assert {where: round(value, 2) for where, value in seen.items() if value < MIN_CONTRAST} == {}


def test_text_is_large_enough_for_half_the_width(every_figure):
    """Of a page, where a picture 8 inches wide has letters half their size."""
    for figure in every_figure.values():
        figure.draw_without_rendering()
        texts = [text for each in figure.legends for text in each.get_texts()]
        for axes in figure.axes:
            texts += [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
        assert figure.get_size_inches()[0] == 8
        assert min(text.get_fontsize() for text in texts if text.get_text()) >= 12


def test_no_picture_is_taller_than_900_pixels_where_it_is_800_wide(every_figure):
    shown = {name: 800 * figure.get_figheight() / figure.get_figwidth() for name, figure in every_figure.items()}
    assert {name: height for name, height in shown.items() if height > 900} == {}


def test_shares_are_in_per_cent(every_figure):
    labelled = {
        (name, axis.get_label_text() or figure.get_supxlabel()): axis.get_major_formatter()(0.025, 0)
        for name, figure in every_figure.items()
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        if "share of bits" in (axis.get_label_text() or (figure.get_supxlabel() if axis is axes.xaxis else ""))
    }
    assert {name for name, _ in labelled} >= {"control", "one s", "many s", "many phase", "many summary"}
    assert set(labelled.values()) == {"2.5 %"}


def test_the_lines_of_the_report_can_be_seen_on_both_grounds():
    sheet = (ROOT / "granite_scu" / "viz" / "assets" / "report.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})", part)) for part in sheet.split("@media", 2)[:2])
    names = ("blue", "sky", "vermilion", "orange", "green", "purple", "ink", "faint")
    found = {
        (scheme["ground"], name): contrast(scheme[name], scheme["ground"]) for scheme in (light, dark) for name in names
    }
    assert len(found) == 16
    assert {where: round(value, 2) for where, value in found.items() if value < MIN_CONTRAST} == {}


@pytest.mark.slow
def test_a_strangers_matplotlibrc_changes_no_picture(finished, tmp_path):
    """Nor does a backend that is not there; as a command, since both are read when matplotlib is imported."""
    strange, other = tmp_path / "elsewhere", tmp_path / "other"
    strange.mkdir()
    (strange / "matplotlibrc").write_text("text.usetex: True\nfont.size: 40\naxes.facecolor: red\n")
    line = [sys.executable, "-m", "granite_scu", "plot", finished, "--out", other]
    environment = os.environ | {"MPLBACKEND": "nonsense"}
    done = subprocess.run(line, cwd=strange, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "own").mkdir()
    figures = draw_figures(group([read_run(finished)]))
    own = [file for name, figure in figures.items() for file in style.save(figure, tmp_path / "own" / name)]
    assert own and all(file.read_bytes() == (other / file.name).read_bytes() for file in own)


def test_a_picture_that_cannot_be_drawn_is_a_warning(finished, monkeypatch, caplog):
    def fail(run):
        raise RuntimeError("latex could not be found")

    monkeypatch.setattr(control_plot, "plot_control", fail)
    monkeypatch.setattr(logging.getLogger("granite_scu"), "propagate", True)
    monkeypatch.setattr(present, "report", fail)
    monkeypatch.setattr(present.model_card, "gather", lambda folder: "chats\udcff.jsonl")
    monkeypatch.setattr(present.model_card, "model_card", str)
    present.present(finished)
    assert not (finished / "control.png").exists() and (finished / "README.md").read_text() == "chats\\udcff.jsonl"
    assert "granite-scu report" in caplog.text
    assert "latex could not be found" in caplog.text and "granite-scu plot" in caplog.text
