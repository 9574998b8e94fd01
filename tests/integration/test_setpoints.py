"""What a run says and does about its setpoint: beyond reach, and held long enough to stop."""

import json
from pathlib import Path

import pytest
from outcomes import done, refused_line

SMALL = ("--test-run", "--precision", "fp32", "--batch-size", 1, "--block-size", 64, "--eval-iters", 2)
SMALL += ("--warmup-steps", 2, "--control-every", 2, "--eval-batch-size", 16)
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
