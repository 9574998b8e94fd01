"""The figures of one run and of several: what they draw is what the histories have."""

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import METRICS, record, rising, settings, write_run
from matplotlib.colors import to_hex

from granite_scu.cli.main import main
from granite_scu.viz import figures, style
from granite_scu.viz.groups import group
from granite_scu.viz.run_folder import read_run

ROOT = Path(__file__).parents[2]


def lines(axes) -> dict[str, object]:
    return {line.get_label(): line for line in axes.get_lines()}


def legend(figure) -> list[str]:
    return [text.get_text() for each in figure.legends for text in each.get_texts()]


@pytest.fixture
def make(tmp_path):
    """Makes and reads a finished run; ``shift`` moves its measurements, so that runs can be told apart."""
    counter = iter(range(100))

    def make(controller="pi", target=0.02, lam=None, seed=42, shift=0.0, test=5.85, ticks=40, **changes):
        history = [
            each | {"s": each["s"] + shift, "s_ema": each["s_ema"] + shift, "data_bpt": each["data_bpt"] + shift}
            for each in rising(ticks)
        ]
        for each in history:
            each["s_target"] = target
            each["lambda"] = each["lambda"] if lam is None else lam
        control = {"controller": controller, "lambda_init": lam} | changes.pop("control", {})
        asked = settings(seed=seed, control=control, **changes)
        metrics = METRICS | {"adapter_test_bpt": test}
        folder = tmp_path / f"run{next(counter)}"
        config = {"controller": controller, "target_s": target}
        return read_run(write_run(folder, history, config, asked, [(100, 6.1 + shift), (200, 5.9 + shift)], metrics))

    return make


# Groups.


def test_runs_that_differ_in_their_seed_alone_are_one_group(make):
    runs = [make(seed=1), make(seed=2), make(seed=2, lora={"rank": 8}), make(target=0.05)]
    found = group(runs)
    labels = ["pi, S* = 2 %, rank 16 (2 runs)", "pi, S* = 2 %, rank 8", "pi, S* = 5 %, rank 16"]
    assert [each.label for each in found] == labels
    assert [len(each.runs) for each in found] == [2, 1, 1]


def test_where_a_run_was_written_or_ran_sets_nothing_apart(make):
    runs = [make(run={"output_dir": name}, machine={"name": name}, git_revision=name) for name in ("a", "b")]
    assert [each.label for each in group(runs)] == ["pi, S* = 2 % (2 runs)"]


def test_what_ends_a_run_and_the_tokens_of_a_step_set_it_apart(make):
    runs = [make(), make(run={"early_stopping": 3}), make(plan={"tokens_per_step": 4 * 512})]
    assert [len(each.runs) for each in group(runs)] == [1, 1, 1]


def test_runs_that_differ_in_much_go_by_their_folders_names(make, recwarn):
    runs = [make(), make(target=0.1, optimizer={"learning_rate": 0.5}, lora={"rank": 8, "targets": ["q_proj"] * 9})]
    groups = group(runs)
    assert [each.label for each in groups] == [
        f"pi, S* = {s} %, {run.name}" for s, run in zip((2, 10), runs, strict=True)
    ]
    figures.plot_summary(groups).canvas.draw()
    assert not [str(each.message) for each in recwarn if "layout" in str(each.message)]


@pytest.mark.parametrize(
    ("changes", "names", "labels"),
    [
        ([{"data": {"path": f"{folder}/chats.jsonl"}} for folder in "ab"], ("run1", "run2"),
         [f"pi, S* = 2 %, path chats.jsonl, run{k}" for k in (1, 2)]),
        ([{"data": {"path": "x" * k}} for k in (50, 60)], ("x/run", "y/run"),
         ["pi, S* = 2 %, x/run", "pi, S* = 2 %, y/run"]),
        ([{"data": {"path": "x" * k}} for k in (50, 60)], ("r" * 40 + "1", "r" * 40 + "2"),
         [f"pi, S* = 2 %, {'r' * 40}{k}" for k in (1, 2)]),
    ],
)  # fmt: skip
def test_no_two_groups_have_the_same_name(make, tmp_path, changes, names, labels):
    runs = [replace(make(**each), path=tmp_path / name) for each, name in zip(changes, names, strict=True)]
    assert [each.label for each in group(runs)] == labels


def test_of_many_runs_every_label_has_its_place_and_the_panel_its_height(make):
    groups = group([make(lora={"rank": rank}, ticks=2) for rank in range(1, 41)])
    figure = figures.plot_summary(groups)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) == 40 and all(upper.y0 >= lower.y1 for upper, lower in itertools.pairwise(boxes))
    figure = figures.plot_s(groups)
    figure.draw_without_rendering()
    assert figure.axes[0].get_window_extent().height > 3 * figure.dpi


def test_the_loader_sets_nothing_apart_and_of_a_path_its_name_does(make):
    found = group([make(), make(data={"num_workers": 4}), make(data={"path": ["/home/ada/letters", "notes.txt"]})])
    assert [each.label for each in found] == [
        "pi, S* = 2 %, path stdlib-docs (2 runs)",
        "pi, S* = 2 %, path letters+notes.txt",
    ]


def test_a_setting_that_the_law_does_not_heed_sets_nothing_apart(make):
    runs = [make("fixed", None, 0.1), make("fixed", None, 0.1, control={"target_s": 0.3})]
    assert [each.label for each in group(runs)] == ["fixed, λ = 0.1 (2 runs)"]
    runs = [make(), make(control={"lambda_init": 0.5})]
    labels = ["pi, S* = 2 %, lambda_init unset", "pi, S* = 2 %, lambda_init 0.5"]
    assert [each.label for each in group(runs)] == labels, "where it starts from"


def test_a_grid_is_in_its_order_and_told_apart_in_grey_and_by_the_colour_blind(make):
    grid = [make("fixed", None, lam) for lam in (1.0, 0.01, 0.1)]
    found = group([make(), *grid, make("none", None, 0.0)])
    assert [each.label for each in found] == [
        "pi, S* = 2 %",
        "fixed, λ = 0.01",
        "fixed, λ = 0.1",
        "fixed, λ = 1",
        "none",
    ]
    light = [np.dot(each.colour[:3], (0.2126, 0.7152, 0.0722)) for each in found[1:4]]
    assert light == sorted(light) and np.diff(light).min() > 0.1
    assert len({each.dashes for each in found}) == 3, "a dash pattern for each law"
    assert to_hex(found[0].colour) == style.VERMILION.lower()


def test_the_line_of_a_group_is_the_median_and_its_band_the_range(make):
    (found,) = group([make(seed=seed, shift=shift) for seed, shift in enumerate((0.0, 0.01, 0.05))])
    steps, median, low, high = found.course(lambda run: (run.column("step"), run.column("s")))
    base = np.array([each["s"] for each in rising()])
    assert steps.tolist() == list(range(10, 401, 10))
    np.testing.assert_allclose([low, median, high], [base, base + 0.01, base + 0.05])


def test_a_run_that_stopped_early_takes_part_as_far_as_it_got(make):
    other = make(seed=2, shift=1.0)
    (found,) = group([make(seed=1), replace(other, history=other.history[:10])])
    steps, median, *_ = found.course(lambda run: (run.column("step"), run.column("s")))
    base = np.array([each["s"] for each in rising()])
    assert len(steps) == 40
    np.testing.assert_allclose(median, base + np.where(np.arange(40) < 10, 0.5, 0.0))


# Figures of one run.


def test_every_figure_of_one_run_has_its_labels_and_units(make):
    drawn = {name: plot(group([make()])) for name, plot in figures.FIGURES.items()}
    assert list(drawn) == ["s", "lambda", "data_bpt", "param_bpt", "phase", "validation", "step_time", "summary"]
    named = {
        "s": "S (share of bits)",
        "lambda": "λ (no unit)",
        "data_bpt": "DataBPT (bits per token)",
        "param_bpt": "ParamBPT (bits per token)",
        "validation": "validation (bits per token)",
        "step_time": "time of a step (s)",
    }
    for name, label in named.items():
        (axes,) = drawn[name].axes
        assert axes.get_ylabel() == label and axes.get_xlabel() == "optimizer steps"
        assert axes.get_xlim()[0] == 0


def test_one_run_is_drawn_as_it_was_measured(make):
    run = make()
    groups = group([run])
    (s,) = figures.plot_s(groups).axes
    np.testing.assert_array_equal(lines(s)["S at each tick"].get_ydata(), run.column("s"))
    (lam,) = figures.plot_lambda(groups).axes
    assert lam.get_yscale() == "log"
    np.testing.assert_array_equal(lines(lam)["λ"].get_ydata(), run.column("lambda"))
    (data,) = figures.plot_data_bpt(groups).axes
    np.testing.assert_array_equal(lines(data)["DataBPT at each tick"].get_ydata(), run.column("data_bpt"))
    mean = lines(data)["running mean"].get_ydata()
    assert mean[10] == pytest.approx(run.column("data_bpt")[9:12].mean())
    (param,) = figures.plot_param_bpt(groups).axes
    np.testing.assert_array_equal(lines(param)["pi, S* = 2 %"].get_ydata(), run.column("param_bpt"))


def test_validation_shows_the_best(make):
    (axes,) = figures.plot_validation(group([make()])).axes
    assert lines(axes)["validation"].get_xydata().tolist() == [[100, 6.1], [200, 5.9], [400, 5.9]]
    assert "best: 5.900 at step 200" in lines(axes)


def test_the_time_of_a_step_comes_from_tokens_and_their_rate(make):
    (axes,) = figures.plot_step_time(group([make()])).axes
    np.testing.assert_allclose(lines(axes)["each tick"].get_ydata(), 4096 / 2000)
    assert "median 2.05 s" in lines(axes)


def test_the_phase_plot_ends_on_the_line_of_the_setpoint(make):
    run = make()
    left, right = figures.plot_phase(group([run])).axes
    path = lines(left)["pi, S* = 2 %"].get_xydata()
    np.testing.assert_array_equal(path[:, 0], run.column("lambda"))
    np.testing.assert_array_equal(path[:, 1], run.column("s_ema"))
    param, data = lines(right)["S*"].get_xydata().T
    np.testing.assert_allclose(param / (param + data), 0.02)
    assert (left.get_xlabel(), right.get_xlabel()) == ("λ (no unit)", "ParamBPT (bits per token)")


def test_the_summary_has_the_test_score_and_the_base(make):
    scored, s, lam = figures.plot_summary(group([make()])).axes
    assert scored.get_xlabel() == "bits per token" and scored.texts[0].get_text() == "base 6.500"
    assert lines(scored)["median"].get_xdata().item() == 5.85
    assert lines(s)["median"].get_xdata().item() == pytest.approx(rising()[-1]["s_ema"])
    assert lines(lam)["median"].get_xdata().item() == pytest.approx(10) and lam.get_xscale() == "log"


@pytest.mark.parametrize("doubles", [False, True])
def test_what_was_tested_on_has_its_name_and_a_finished_run_without_it_no_missing_summary(make, doubles):
    run = make(test=None)
    run.metrics["test_is_validation"] = doubles
    scored, *_ = figures.plot_summary(group([run])).axes
    assert [text.get_text() for text in scored.texts] == ["no test"]
    assert scored.get_title() == ("validation documents" if doubles else "held-out documents")


def test_a_dollar_in_a_name_is_one(make, tmp_path):
    with style.as_designed():
        figures.plot_param_bpt(group([replace(make(), path=tmp_path / "a$\\foo$b")])).draw_without_rendering()


def test_a_base_far_off_is_said_in_words_and_squeezes_nothing(make):
    scored, *_ = figures.plot_summary(group([make(test=5.80), make("none", None, 0.0, test=5.85)])).axes
    assert scored.get_xlabel() == "bits per token; base 6.500" and scored.get_xlim()[1] < 5.9


# Figures of several.


def test_a_grid_against_pi_has_a_line_each_and_one_band_for_the_one_setpoint(make):
    runs = [make(), *(make("fixed", None, lam) for lam in (0.01, 1.0))]
    figure = figures.plot_s(group(runs))
    (axes,) = figure.axes
    assert {"pi, S* = 2 %", "fixed, λ = 0.01", "fixed, λ = 1"} == {name for name in lines(axes) if name[0] != "_"}
    assert legend(figure) == ["pi, S* = 2 %", "fixed, λ = 0.01", "fixed, λ = 1"]
    (band,) = axes.collections
    assert to_hex(band.get_facecolor()[0]) == style.GREEN.lower()


def test_a_sweep_of_setpoints_has_a_band_each_in_its_own_colour(make):
    groups = group([make(target=target) for target in (0.02, 0.05, 0.1)])
    (axes,) = figures.plot_s(groups).axes
    assert [to_hex(band.get_facecolor()[0]) for band in axes.collections] == [to_hex(each.colour) for each in groups]


def test_seeds_have_a_band_from_least_to_greatest(make):
    (axes,) = figures.plot_lambda(group([make("fixed", None, 0.5, seed=1), make("fixed", None, 0.5, seed=2)])).axes
    assert len(axes.collections) == 1
    (axes,) = figures.plot_validation(group([make(seed=1), make(seed=2, shift=0.5)])).axes
    extent = axes.collections[0].get_datalim(axes.transData)
    assert (extent.y0, extent.y1) == pytest.approx((5.9, 6.6))


def test_what_cannot_be_drawn_is_named(make):
    groups = group([make(), make("none", None, 0.0)])
    assert legend(figures.plot_lambda(groups)) == ["pi, S* = 2 %", "none: λ = 0"]
    (axes,) = figures.plot_lambda(groups[1:]).axes
    assert axes.texts[0].get_text() == "λ = 0 throughout: nothing is steered"
    assert figures.plot_phase(groups[1:]).axes[0].texts[0].get_text() == "λ = 0"
    never = group([replace(run, validations=()) for each in groups for run in each.runs])
    assert figures.plot_validation(never).axes[0].texts[0].get_text() == "never validated"
    *_, lam = figures.plot_summary(groups).axes
    assert lam.texts[0].get_text() == "λ = 0"


def test_the_summary_of_several_has_every_seed(make):
    runs = [make(seed=seed, test=test) for seed, test in ((1, 5.8), (2, 5.9), (3, 6.0))]
    scored, *_ = figures.plot_summary(group([*runs, make("none", None, 0.0, test=5.7)])).axes
    points = [line.get_xdata().tolist() for line in scored.get_lines() if line.get_marker() == "o"]
    assert points == [[5.8, 5.9, 6.0], [5.9], [5.7], [5.7]]
    assert [label.get_text() for label in scored.get_yticklabels()] == ["pi, S* = 2 % (3 runs)", "none"]


def test_runs_that_are_not_finished_are_drawn_as_far_as_they_got(make, cut_off):
    groups = group([make(), read_run(cut_off)])
    for plot in figures.FIGURES.values():
        plot(groups)
    groups = group([read_run(cut_off)])
    scored, *_ = figures.plot_summary(groups).axes
    assert scored.texts[0].get_text() == "no summary"


def test_a_history_with_little_in_it_is_drawn(tmp_path):
    bare = {"step": 7, "s": 0.1}
    (tmp_path / "scu_history.jsonl").write_text(json.dumps(bare) + "\n")
    groups = group([read_run(tmp_path)])
    for plot in figures.FIGURES.values():
        plot(groups).canvas.draw()


# The command.


@pytest.mark.slow
def test_the_command_draws_every_figure_twice(make, tmp_path, capsys):
    runs = [make().path, make("none", None, 0.0).path]
    assert main(["plot", *map(str, runs), "--out", str(tmp_path / "new" / "pictures")]) == 0
    written = capsys.readouterr().out.splitlines()
    assert sorted(Path(path).name for path in written) == sorted(
        f"{name}.{kind}" for name in figures.FIGURES for kind in ("png", "svg")
    )
    assert sorted(map(str, (tmp_path / "new" / "pictures").iterdir())) == sorted(written)
    assert all(Path(path).stat().st_size > 5000 for path in written)


def test_a_checkout_has_the_command_of_the_guides_which_names_a_run_that_is_none(make, tmp_path):
    line = [
        sys.executable,
        "-m",
        "viz.generate_ablation_plots",
        make().path,
        tmp_path / "missing",
        "--out",
        tmp_path / "x",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: ") and "missing: no such folder" in said
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_what_it_cannot_do_is_one_line_and_leaves_nothing(make, tmp_path, capsys):
    run = make().path
    nothing = write_run(tmp_path / "nothing", [record(10, s=math.nan, data_bpt=None)], {}, settings())
    (tmp_path / "file").touch()
    refused = [
        ([run, nothing], "new", "nothing: nothing was measured in its 1 tick"),
        ([run, run], "new", "is named twice"),
        ([tmp_path / "missing.json"], "new", "missing.json"),
        ([run], "file", "file is a file, and not a folder; choose another"),
        ([run], 300 * "x", "cannot be written to (File name too long)"),
        ([run], "file/below", "file is a file, and not a folder"),
    ]
    for sources, out, words in refused:
        assert main(["plot", *map(str, sources), "--out", str(tmp_path / out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and words in line
    assert not (tmp_path / "new").exists() and not list(tmp_path.rglob("*.tmp"))
