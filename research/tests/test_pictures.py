"""Pictures of comparison, step test and tracking keep to what those of runs keep to: tests/viz/test_style.py."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from test_style import MIN_CONTRAST, contrast, to_rgba

from granite_scu.viz import style
from research.comparison import results
from research.comparison.cost_plot import plot_costs
from research.comparison.evidence import Evidence
from research.comparison.plan import Plan
from research.comparison.plot import plot_comparison, plot_operating_points, read_comparison
from research.comparison.protocol import FRESH_THIRD
from research.identification.plot import plot_identification
from research.tracking.plot import plot_tracking

EVIDENCE = Path(__file__).parents[1] / "evidence"


@pytest.fixture(scope="module")
def comparison() -> dict:
    return results.report(Plan(FRESH_THIRD, Evidence(EVIDENCE / "fresh-third" / "runs")))


@pytest.fixture(scope="module")
def every_figure(comparison) -> dict[str, Figure]:
    cell = {"disturbance": "", "setpoint": 0.02}
    tracked = [(cell | {"learning_rate": 10.0**-k}, [(10, 0.5), (20, 1.0)]) for k in range(4)]
    return {
        **plot_comparison(comparison),
        "operating points": plot_operating_points(comparison),
        "cost": plot_costs(comparison),
        "identification": plot_identification(identified()),
        "tracking": plot_tracking(tracked, 0.1),
    }


def identified() -> dict:
    """The smallest result of a step test."""
    one = {"value": 1.0, "standard_error": 0.1}
    logs = [-4.0, -4.1, -3.9, -4.0]
    return {
        "model": {"gain": one, "tau": one, "theta": one},
        "setpoint": 0.02,
        "fit": {"start": 1, "r2": 0.9},
        "excitation": {"log_s": logs, "log_s_fitted": logs, "log_lambda": [0.0, 0.5, -0.5, 0.0]},
        "gains": {"kp": 1.0, "ki": 0.1},
        "step_test": {"step": 1.5},
        "verification": {"at": 2, "log_s": logs, "log_s_smoothed": logs, "predicted": {"response": [0.0, 1.0]}},
    }


def test_every_line_and_point_can_be_seen_on_white(every_figure):
    seen = {
        (name, str(colour)): contrast(colour)
        for name, figure in every_figure.items()
        for axes in figure.axes
        for line in axes.get_lines()
        for colour in [to_rgba(line.get_color(), line.get_alpha())]
    }
    assert len(seen) > 10
    assert {where: round(value, 2) for where, value in seen.items() if value < MIN_CONTRAST} == {}


def test_no_picture_is_taller_than_900_pixels_where_it_is_800_wide(every_figure):
    shown = {name: 800 * figure.get_figheight() / figure.get_figwidth() for name, figure in every_figure.items()}
    assert {name: height for name, height in shown.items() if height > 900} == {}


def test_each_arm_is_at_its_loss_and_its_s(comparison):
    tasks, drawn = comparison["tasks"], plot_operating_points(comparison)
    panels = [axes for axes in drawn.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == [task["name"] for task in tasks]
    points = {tuple(line.get_xydata()[0]) for line in panels[0].get_lines()}
    for row in tasks[0]["rows"]:
        y = min(row["test_bpt"]["mean"], panels[0].get_ylim()[1])
        assert any(x == row["s_at_end"] and y == pytest.approx(at) for x, at in points), row["name"]


def test_a_comparison_that_would_be_too_tall_is_several_pictures_with_every_task_once(tmp_path):
    rows = [
        {"name": f"arm {k}", "is_reference": not k, "test_bpt": {"mean": 5.0 + k}, "difference": None}
        for k in range(20)
    ]
    file = tmp_path / "comparison.json"
    file.write_text(json.dumps({"tasks": [{"name": f"task {k}", "rows": rows} for k in range(7)]}))
    drawn = plot_comparison(read_comparison(file))
    assert list(drawn)[:2] == ["comparison", "comparison-2"]
    titles = [axes.get_title(loc="left") for figure in drawn.values() for axes in figure.axes if axes.get_visible()]
    assert titles == [f"task {k}" for k in range(7)]
    assert max(figure.get_figheight() for figure in drawn.values()) <= style.TALLEST
