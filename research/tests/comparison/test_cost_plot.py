"""The picture of what each way to set lambda costs, from the comparison's JSON alone."""

import pytest

from research.comparison.cost_plot import AUTO, plot_costs, ways


def line(name: str, seconds: float, *excess: float) -> dict:
    cost = {"runs": 1, "tokens": 1.0, "seconds": seconds}
    mean, worst = sum(excess) / len(excess), max(excess)
    return {"name": name, "excess": dict(enumerate(excess)), "mean": mean, "worst": worst, "cost": cost}


@pytest.fixture
def results() -> dict:
    overview = [
        line("early-stopping", 1.0, -0.01, 0.004),
        line("fixed-stopped λ=0.03", 1.0, 0.01, 0.09),
        line("fixed-stopped λ=0.1", 1.0, 0.02, 0.09),
        line("pi-auto-stopped", 1.2, -0.012, 0.0),
        line("cascade-stopped", 1.8, -0.01),  # on one task
        line("weight-decay", 1.0, 0.0, 0.0),
    ]
    return {"tasks": [{}, {}], "overview": overview}


def test_only_ways_that_were_run_on_all_tasks_are_drawn(results):
    assert set(ways(results)) == {"early stopping", "one λ = 0.03, the best afterwards", AUTO}
    with pytest.raises(ValueError, match="on all tasks"):
        plot_costs({"tasks": [{}, {}], "overview": results["overview"][4:]})


def test_each_way_is_a_point_at_its_cost_and_what_lies_far_above_is_written(results):
    axes = plot_costs(results).axes[0]
    points = {line.get_marker(): line.get_xydata().tolist() for line in axes.lines if line.get_marker() in "oD^"}
    assert points["o"] == [pytest.approx([1.0, -0.3])]
    assert points["D"] == [pytest.approx([1.2, -0.6])]
    ((seconds, height),) = points["^"]
    assert seconds == 1.0 and height < 5  # at the edge, with its number in words
    labels = [text.get_text() for text in axes.texts]
    assert "one λ = 0.03, the best afterwards: mean 5 %, worst 9 %" in labels and AUTO in labels
