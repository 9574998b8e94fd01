"""What a run says and does about its setpoint: beyond reach, found during the run, held long enough to stop."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from outcomes import done, refused_line
from safetensors.torch import load_file

from granite_scu.viz.adapter_size import FIELDS, describe

SMALL = ("--test-run", "--precision", "fp32", "--batch-size", 1, "--block-size", 64, "--eval-iters", 2)
SMALL += ("--warmup-steps", 2, "--control-every", 2, "--eval-batch-size", 16)
SEEKING = (*SMALL, "--target-s", "auto", "--max-steps", 60, "--save-steps", 33, "--lora-dropout", 0.1)
TINY = ("--config", str(Path(__file__).parents[2] / "configs" / "tiny.yaml"), "--data.block_size=64")
TINY += ("--data.batch_size=1", "--control.every=2")


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


# Beyond reach


@pytest.fixture(scope="module")
def unreachable(launch, corpus, tmp_path_factory):
    """S* = 90 % in 30 steps under a wide prior; what the console showed, and the run folder."""
    folder = tmp_path_factory.mktemp("unreachable") / "run"
    beyond = ("--target-s", 0.9, "--max-steps", 30, "--prior-sigma", 0.2)
    code, out, err = launch(*SMALL, *beyond, "--data-dir", corpus, "--output-dir", folder)
    assert (code, err) == (0, "")
    return " ".join(out.split()), folder


def test_a_setpoint_beyond_reach_is_said_before_the_first_step_and_the_run_goes_on(unreachable):
    printed, folder = unreachable
    assert "S* = 90 % cannot be expected" in printed
    assert printed.index("cannot be expected") < printed.index("step 10/30")
    assert read(folder, "scu_metrics.json")["steps"] == 30


def test_it_is_seen_while_running_once_and_the_summary_says_so(unreachable):
    printed, folder = unreachable
    log = (folder / "logs" / "training.log").read_text(encoding="utf-8")
    assert log.count("S* = 90 % is out of reach: S is ") == 1
    found = read(folder, "scu_metrics.json")["reachability"]
    assert found["verdict"] == "stuck below the setpoint"
    assert 0 < found["since_step"] < 30
    assert found["s_expected"] < 0.9
    assert "--target-s" in found["advice"]
    assert f"no: {found['advice']}"[:40] in printed
    assert read(folder, "scu_metrics.json")["stopped"] == {"reason": "max_steps", "step": 30}


@pytest.mark.parametrize(
    ("controller", "warned"), [("pi", True), ("research.laws.projection:Projection", True), ("fixed", False)]
)
def test_a_dry_run_says_that_a_setpoint_lies_above_the_ceiling(launch, corpus, controller, warned):
    beyond = ("--target-s", 0.9, "--max-steps", 30, "--prior-sigma", 0.2)
    flags = (*beyond, "--controller", controller, "--dry-run", "--json")
    out = done(launch, *SMALL, "--data-dir", corpus, *flags)
    assert 0 < json.loads(out)["s_ceiling_estimate"] < 1
    assert ("S* = 90 % cannot be expected" in json.loads(out).get("target_s_advice", "")) == warned


def test_a_bound_far_from_the_lambda_that_is_expected_is_said_before_the_run(launch, corpus):
    clipped = (*SMALL, "--target-s", 0.004, "--lambda-max", 0.1, "--data-dir", corpus)
    out = done(launch, *clipped, "--dry-run", "--json")
    assert "--lambda-max 0.1: S* = 0.4 % is expected to take" in json.loads(out)["target_s_advice"]


# Found inside the run


@pytest.fixture(scope="module")
def auto(launch, corpus, tmp_path_factory):
    """A run that finds its setpoint; what the console showed, and the run folder."""
    folder = tmp_path_factory.mktemp("auto") / "run"
    code, out, err = launch(*SEEKING, "--data-dir", corpus, "--output-dir", folder)
    assert (code, err) == (0, ""), out
    return " ".join(out.split()), folder


def test_auto_says_what_it_moves_the_setpoint_by(auto):
    assert "--target-s auto: S* starts at 20%, and moves at each of 30 ticks; " in auto[0]
    assert (
        " of 1 held-out document, and what so few say may not hold for other text: --controller none is safer"
        in auto[0]
    )


def test_auto_moves_the_setpoint_and_records_what_it_saw(auto):
    records = read(auto[1], "scu_history.json")
    setpoints = [record["s_target"] for record in records]
    assert setpoints[:2] == pytest.approx([0.2, 0.2])
    assert len(set(setpoints)) > 5
    figures = ("savings_held_out", "savings_held_out_slope", "savings_training", "savings_training_slope")
    assert all(math.isfinite(record[figure]) for record in records for figure in figures)
    assert records[-1]["best_scale"] > 0 and records[-1]["best_scale_error"] > 0
    assert read(auto[1], "scu_config.json")["target_s"] is None
    assert yaml.safe_load((auto[1] / "config.yaml").read_text())["control"]["target_s"] == "auto"


def test_auto_says_what_size_held_out_text_would_have_the_adapter(auto):
    last, metrics = read(auto[1], "scu_history.json")[-1], read(auto[1], "scu_metrics.json")
    assert all(metrics[name] == last[name] for name in FIELDS)
    assert f"At the last tick {describe(last)}." in (auto[1] / "report.html").read_text(encoding="utf-8")
    assert "adapter size" in auto[0] and "not judged: S* moves during the run" in auto[0]


def test_a_fixed_setpoint_measures_no_slopes(unreachable):
    assert "best_scale" not in read(unreachable[1], "scu_history.json")[0]
    assert "best_scale" not in read(unreachable[1], "scu_metrics.json")


def test_auto_continues_from_a_checkpoint_as_if_it_had_not_stopped(auto, launch, tmp_path):
    """Checkpoint 33 lies between two ticks."""
    folder = auto[1]
    flags = ("--config", folder / "config.yaml", "--output-dir", tmp_path / "resumed")
    code, out, err = launch(*flags, "--resume-from-checkpoint", folder / "checkpoint-33")
    assert "S* continues where the checkpoint has it" in " ".join(out.split())
    assert (code, err) == (0, ""), out
    last = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[-1].name  # that of the last step
    weights = [load_file(f / last / "adapter_model.safetensors") for f in (folder, tmp_path / "resumed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    names = ("s_target", "lambda", "savings_held_out", "savings_training_slope", "best_scale")
    whole, rest = (
        [[record[name] for name in names] for record in read(f, "scu_history.json")]
        for f in (folder, tmp_path / "resumed")
    )
    assert whole == rest


def test_where_auto_could_not_act_it_is_refused(launch, corpus, tmp_path):
    words = "--target-s auto: acts after each 2 optimizer steps (--control-every), and the run has"
    for more in ((), ("--dry-run",)):
        flags = (*SMALL, "--target-s", "auto", "--data-dir", corpus, "--output-dir", tmp_path / "run")
        assert words in refused_line(launch, *flags, "--max-steps", 2, *more)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def too_little(launch, corpus, tmp_path):
    """The flags of a run without its batch size, and the blocks that its validation text makes."""
    flags = (*SMALL[:3], *SMALL[5:], "--target-s", "auto", "--data-dir", corpus, "--save-steps", 2)
    out = done(launch, *flags, "--output-dir", tmp_path / "run", "--batch-size", 1, "--dry-run", "--json")
    return (*flags, "--max-steps", 4), json.loads(out)["data"]["validation"]["blocks"]


def test_a_tick_has_a_micro_batch_of_validation_text_to_read(launch, tmp_path, too_little):
    (flags, there), run = too_little, ("--output-dir", tmp_path / "run")
    more = ("--batch-size", there + 1)
    err = refused_line(launch, *flags, *run, *more)
    assert not (tmp_path / "run").exists()
    assert f"reads a micro-batch of {there + 1} validation blocks, and the text makes {there}; " in err
    assert f"set --batch-size {there}, give a setpoint, such as --target-s 0.1, or " in err


@pytest.mark.slow
def test_what_is_proposed_where_a_tick_has_too_little_text_is_accepted(launch, tmp_path, too_little):
    (flags, there), run = too_little, ("--output-dir", tmp_path / "run")
    more = ("--batch-size", there + 1)
    remedies = ("--batch-size", there), (*more, "--target-s", 0.1), (*more, "--controller", "none")
    for remedy in (*remedies, ("--batch-size", 2, "--gradient-accumulation-steps", there, "--auto-batch-size")):
        done(launch, *flags, *run, *remedy, "--dry-run")


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ("auto", 0.1, "its setpoint was found during the run; resume with --target-s auto"),
        (0.1, "auto", "its setpoint is 0.1; resume with --target-s 0.1"),
    ],
)
def test_a_checkpoint_of_the_other_kind_of_setpoint_is_refused(launch, corpus, tmp_path, saved, now, words):
    flags = (*SMALL, "--max-steps", 4, "--save-steps", 2, "--data-dir", corpus)
    assert launch(*flags, "--target-s", saved, "--output-dir", tmp_path / "run")[0] == 0
    resumed = ("--resume-from-checkpoint", tmp_path / "run" / "checkpoint-2", "--output-dir", tmp_path / "new")
    assert words in refused_line(launch, *flags, "--target-s", now, *resumed)


# What is refused


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--stop-at-equilibrium", "--controller", "fixed"], "--stop-at-equilibrium: --controller fixed follows no"),
        (
            ["--stop-at-equilibrium", "--measure", "factors", "--kp", "1", "--ki", "0.1"],
            "--stop-at-equilibrium: --measure factors: judges how far the weights moved by how far S rose from 0",
        ),
        (["--stop-at-equilibrium", "--controller", "research.laws.cascade:Cascade"], "laws.cascade:Cascade follows"),
        (["--measure", "factors", "--target-s", "auto", "--kp", "1", "--ki", "0.1"], "--measure factors: --target-s"),
        (["--stop-at-equilibrium", "--target-s", "auto"], "--stop-at-equilibrium: --target-s auto moves the setpoint"),
        (["--stop-at-equilibrium", "--target-s", "0.95"], "--target-s 0.95: its band of 10% reaches to 1"),
        (["--stop-at-equilibrium", "7"], "--stop-at-equilibrium 7: must be at least 8 ticks"),
        (
            ["--stop-at-equilibrium", "30", "--max-steps", "80", "--control-every", "4", "--target-s", "0.02"],
            "--stop-at-equilibrium 30: 80 steps have 20 ticks, so that it could never stop the run; set fewer, a",
        ),
        (["--early-stopping", "3", "--max-steps", "80", "--eval-steps", "20"], "--early-stopping 3: 80 steps hold 3"),
        (["--stop-at-equilibrium", "--deadband", "0.01"], "--stop-at-equilibrium: --deadband 0.01: S that is held"),
        (
            ["--stop-at-equilibrium", "--controller", "research.laws.original:Original", "--target-s", "0.1"],
            "--deadband 0.002, research.laws.original:Original's own: S that is held lies inside",
        ),
    ],
)
def test_what_cannot_be_found_never_settles_or_never_stops_is_refused(launch, argv, words):
    assert words in refused_line(launch, "--test-run", "--output-dir", "never", *argv)


# Held long enough


@pytest.mark.slow  # what makes it stop needs some 200 steps of 1024 tokens, fewer are too noisy to tell
def test_a_run_in_equilibrium_stops_and_says_so(launch, tmp_path):
    """The test run as it comes: S is held from about step 80."""
    flags = ("--target-s", 0.02, "--stop-at-equilibrium", 12, "--output-dir", tmp_path / "run")
    code, out, err = launch("--test-run", *flags)
    assert (code, err) == (0, ""), out
    metrics, records = read(tmp_path / "run", "scu_metrics.json"), read(tmp_path / "run", "scu_history.json")
    assert metrics["stopped"] == {"reason": "equilibrium", "step": metrics["steps"]}
    assert 12 * 4 < metrics["steps"] < 240
    assert all(abs(record["s_ema"] / 0.02 - 1) <= 0.1 for record in records[-12:])
    printed = " ".join(out.split())
    assert "stops at equilibrium: S stayed within 10% of 2 % for 12 ticks" in printed
    assert f"at step {metrics['steps']}, by --stop-at-equilibrium" in printed
