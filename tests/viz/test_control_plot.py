"""Pictures of run folders made by hand: finished, unfinished, without a setpoint, damaged, missing."""

import json
import re
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pytest
from folders import METRICS, record

from granite_scu.config.errors import UserError
from granite_scu.viz.control_plot import plot_control
from granite_scu.viz.run_folder import read_run
from granite_scu.viz.style import save

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def unfinished(folder: Path, records: list[dict], torn: str = "") -> Path:
    folder.mkdir()
    lines = "".join(json.dumps(each) + "\n" for each in records)
    (folder / "scu_history.jsonl").write_text(lines + torn)
    return folder


def lines(axes) -> dict[str, np.ndarray]:
    return {line.get_label(): np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()}


def axes_of(folder: Path):
    return plot_control(read_run(folder)).axes


# Reading.


def test_a_finished_run_is_read_whole(finished):
    run = read_run(finished)
    assert run.finished and run.name == "finished" and len(run.history) == 40
    assert run.config["controller"] == "pi" and run.metrics == METRICS
    assert run.column("step").tolist() == list(range(10, 401, 10))
    assert np.isnan(run.column("gpu_memory_gb")).all(), "null is not measured, not zero"


def test_an_unfinished_run_is_read_up_to_its_torn_line(tmp_path):
    folder = unfinished(tmp_path / "run", [record(10), record(20)], torn='{"step": 30, "s": 0.0')
    run = read_run(folder)
    assert not run.finished and run.column("step").tolist() == [10, 20]
    assert run.config == {} and run.metrics == {}


def test_a_finished_run_that_goes_on_is_unfinished(finished):
    (finished / "scu_history.jsonl").write_text(json.dumps(record(10)) + "\n")
    run = read_run(finished)
    assert len(run.history) == 1 and not run.finished


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("scu_history.json", "[{", "scu_history.json: not JSON"),
        ("scu_history.json", '{"step": 10}', "not a JSON list"),
        ("scu_history.json", "[]", "no tick is recorded yet"),
        ("scu_history.jsonl", '{"step": 10}\n{"st\n{"step": 30}\n', "scu_history.jsonl: line 2 is damaged"),
        ("scu_history.jsonl", "3\n", "scu_history.jsonl: not records of ticks"),
        ("notes.txt", "", "has neither scu_history.json nor scu_history.jsonl"),
    ],
)
def test_what_is_no_run_is_named_in_one_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=re.escape(says)) as refused:
        read_run(tmp_path)
    message = str(refused.value)
    assert str(tmp_path) in message and "\n" not in message


# Drawing.


def test_s_is_drawn_against_its_setpoint_over_shared_steps(finished):
    run = read_run(finished)
    above, below = plot_control(run).axes
    drawn = lines(above)
    assert set(drawn) == {"S at each tick", "S smoothed", "S* = 2 %, band ± 10 % of it"}
    np.testing.assert_array_equal(drawn["S at each tick"], run.column("s"))
    np.testing.assert_array_equal(drawn["S smoothed"], run.column("s_ema"))
    band = above.collections[0].get_datalim(above.transData)
    assert (band.y0, band.y1) == pytest.approx((0.018, 0.022))
    assert above.get_xlim() == below.get_xlim() and below.get_xlim()[0] == 0
    assert "optimizer steps" in below.get_xlabel()


def test_drift_stands_in_place_of_s_where_it_was_held(held):
    above, _ = axes_of(held)
    drawn, run = lines(above), read_run(held)
    np.testing.assert_array_equal(drawn["drift at each tick"], run.column("drift"))
    np.testing.assert_array_equal(drawn["kept, on held-out text"], [0.021])
    assert "at most 2 %" in drawn


@pytest.mark.parametrize(("least", "scale"), [(0.0001, "log"), (0.005, "linear")])
def test_s_is_logarithmic_beyond_a_decade(tmp_path, least, scale):
    folder = unfinished(tmp_path / "run", [record(10, s=least, s_ema=least), record(20)])
    assert axes_of(folder)[0].get_yscale() == scale


def test_saturated_and_held_ticks_are_marked_where_they_are(tmp_path):
    history = [record(10 * k, saturated=k == 2, held=k == 3, **{"lambda": float(k)}) for k in range(1, 5)]
    _, below = axes_of(unfinished(tmp_path / "run", history))
    assert lines(below)["at a bound"].tolist() == [2.0]
    assert lines(below)["held"].tolist() == [3.0]


def test_without_a_controller_there_is_no_band_and_words_in_place_of_lambda(tmp_path):
    history = [record(10 * k, s_target=None, error=None, **{"lambda": 0.0}) for k in range(1, 5)]
    above, below = axes_of(unfinished(tmp_path / "run", history))
    assert set(lines(above)) == {"S at each tick", "S smoothed"} and not above.collections
    assert not below.get_lines() and "λ = 0" in below.texts[0].get_text()


def test_a_measurement_that_failed_leaves_a_gap(tmp_path):
    history = [record(10), record(20, s=None, data_bpt=None, held=True), record(30)]
    above, _ = axes_of(unfinished(tmp_path / "run", history))
    assert np.isnan(lines(above)["S at each tick"]).tolist() == [False, True, False]


def test_every_measurement_may_have_failed(tmp_path):
    history = [record(10, s=None, s_ema=None, s_target=None, **{"lambda": None})]
    figure = plot_control(read_run(unfinished(tmp_path / "run", history)))
    figure.canvas.draw()
    assert figure.axes[1].texts[0].get_text() == "λ was not recorded"


def test_one_tick_can_be_seen(tmp_path):
    above, below = axes_of(unfinished(tmp_path / "run", [record(10)]))
    assert {line.get_marker() for line in (*above.get_lines()[:2], *below.get_lines())} == {"o"}


def test_no_state_is_left_in_pyplot(finished):
    plot_control(read_run(finished))
    assert matplotlib.pyplot.get_fignums() == []


# Writing.


def test_png_and_svg_are_written_and_the_same_again(finished, tmp_path):
    written = [path.read_bytes() for path in save(plot_control(read_run(finished)), tmp_path / "v1.0")]
    assert written[0].startswith(PNG_SIGNATURE) and b"<svg" in written[1]
    assert sorted(path.name for path in tmp_path.glob("v1.0.*")) == ["v1.0.png", "v1.0.svg"]
    again = [path.read_bytes() for path in save(plot_control(read_run(finished)), tmp_path / "v1.0")]
    assert written == again
