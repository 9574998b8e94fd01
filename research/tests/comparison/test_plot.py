"""The picture of a comparison, from its JSON alone."""

import json

import pytest

from research.comparison.plot import main, plot_comparison


def row(name: str, mean: float, low: float | None = None, high: float | None = None) -> dict:
    return {
        "name": name,
        "is_reference": name == "pi",
        "test_bpt": {"mean": mean, "low": mean - 1, "high": mean + 1},
        "difference": None if low is None else {"mean": mean - 5.0, "low": low, "high": high},
    }


@pytest.fixture
def results() -> dict:
    rows = [
        row("pi", 5.0),
        row("fixed, swept (λ=0.1)", 5.01, -0.01, 0.03),
        row("replay", 4.98, -0.03, -0.01),
        row("none", 7.5, 2.4, 2.6),
    ]
    return {"tasks": [{"name": "docs", "reference": "pi", "rows": rows}]}


def test_each_arm_has_a_line_and_each_verdict_a_marker(results):
    figure = plot_comparison(results)["comparison"]
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["pi", "fixed, swept", "replay", "none"]
    markers = {line.get_label(): line.get_marker() for line in axes.lines if not line.get_label().startswith("_")}
    assert markers == {"reference": "D", "no difference shown": "o", "better": "v"}


def test_what_is_not_decided_is_drawn_as_no_difference(results):
    results["tasks"][0]["rows"][2]["decided"] = False  # of two seeds
    lines = plot_comparison(results)["comparison"].axes[0].lines
    assert "better" not in [line.get_label() for line in lines]


def test_a_point_far_to_the_right_is_written_at_the_edge_and_squeezes_none(results):
    axes = plot_comparison(results)["comparison"].axes[0]
    assert axes.get_xlim()[1] < 5.2
    assert [text.get_text() for text in axes.texts] == ["7.500"]


def test_the_reference_is_in_the_panel_though_all_others_lie_far_to_its_left(results):
    results["tasks"][0]["rows"] = [row("pi", 5.0)] + [row(f"arm {i}", 4.0 + i / 1000, -1.1, -0.9) for i in range(5)]
    axes = plot_comparison(results)["comparison"].axes[0]
    assert axes.get_xlim()[0] < 4.0 < 5.0 < axes.get_xlim()[1]
    assert not axes.texts


def test_an_interval_that_makes_room_for_a_far_point_has_it_drawn_whole(results):
    wide, far = row("fixed, swept (λ=0.1)", 5.01, -0.5, 0.5), row("none", 5.48, 0.3, 0.7)
    results["tasks"][0]["rows"] = [row("pi", 5.0), row("replay", 4.99, -0.02, -0.01), wide, far]
    axes = plot_comparison(results)["comparison"].axes[0]
    assert not axes.texts and axes.get_xlim()[1] > 5.7


def test_only_the_arms_that_one_of_two_neighbours_has_take_a_line(results):
    few = [row("pi", 5.0), row("replay", 4.98, -0.03, -0.01)]
    results["tasks"] += [{"name": name, "reference": "pi", "rows": few} for name in ("second", "third", "fourth")]
    labels = [
        [text.get_text() for text in axes.get_yticklabels()] for axes in plot_comparison(results)["comparison"].axes
    ]
    assert labels[0] == ["pi", "fixed, swept", "replay", "none"]
    assert labels[2] == ["pi", "replay"]


def test_the_command_draws_both_kinds(results, tmp_path, capsys):
    (tmp_path / "comparison.json").write_text(json.dumps(results))
    assert main([str(tmp_path / "comparison.json")]) == 0
    assert (tmp_path / "comparison.png").stat().st_size > 5000
    first = (tmp_path / "comparison.svg").read_text()
    assert first.startswith("<?xml")
    assert [main([str(tmp_path / "comparison.json")]) for _ in range(3)] == [0, 0, 0]
    assert (tmp_path / "comparison.svg").read_text() == first


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[]",
        '{"tasks": []}',
        '{"tasks": [{"name": "docs", "rows": [{"name": "pi"}]}]}',
        json.dumps({"tasks": [{"name": "docs", "rows": [row("pi", 5.0) | {"test_bpt": {}}]}]}),
        json.dumps({"tasks": [{"name": "docs", "rows": [row("pi", 5.0) | {"test_bpt": None}]}]}),
    ],
)
def test_what_it_cannot_draw_is_one_line(text, tmp_path, capsys):
    (tmp_path / "comparison.json").write_text(text)
    assert main([str(tmp_path / "comparison.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
