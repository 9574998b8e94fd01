"""What a run says and does about its setpoint: beyond reach, found by a probe, held long enough to stop."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from granite_scu import control
from granite_scu.cli import request_parser as cli
from granite_scu.training.recipe import prepare

SMALL = ("--test-run", "--precision", "fp32", "--batch-size", 1, "--block-size", 64, "--eval-iters", 2)
SMALL += ("--warmup-steps", 2, "--control-every", 2, "--eval-batch-size", 16)
PROBED = (*SMALL, "--max-steps", 16, "--save-steps", 8, "--lora-dropout", 0.1)


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
    assert "S* = 0.9 cannot be expected" in printed
    assert printed.index("cannot be expected") < printed.index("step 10/30")
    assert read(folder, "scu_metrics.json")["steps"] == 30


def test_it_is_seen_while_running_once_and_the_summary_says_so(unreachable):
    printed, folder = unreachable
    log = (folder / "logs" / "cuda_optimized_training.log").read_text(encoding="utf-8")
    assert log.count("out of reach (S_free below S*)") == 1
    found = read(folder, "scu_metrics.json")["reachability"]
    assert found["verdict"] == "stuck below the setpoint"
    assert 0 < found["since_step"] < 30
    assert found["s_expected"] < 0.9
    assert "--target-s" in found["advice"]
    assert "no, stuck below the setpoint since step" in printed
    assert read(folder, "scu_metrics.json")["stopped"] == {"reason": "max_steps", "step": 30}


@pytest.mark.parametrize(("controller", "warned"), [("pi", True), ("projection", True), ("fixed", False)])
def test_a_dry_run_says_that_a_setpoint_lies_above_the_ceiling(launch, corpus, controller, warned):
    beyond = ("--target-s", 0.9, "--max-steps", 30, "--prior-sigma", 0.2)
    flags = (*beyond, "--controller", controller, "--dry-run", "--json")
    code, out, _ = launch(*SMALL, "--data-dir", corpus, *flags)
    assert code == 0
    assert 0 < json.loads(out)["s_ceiling_estimate"] < 1
    assert ("S* = 0.9 cannot be expected" in json.loads(out).get("target_s_advice", "")) == warned


def test_a_bound_far_from_the_lambda_that_is_expected_is_said_before_the_run(launch, corpus, tmp_path):
    clipped = (*SMALL, "--target-s", 0.004, "--lambda-max", 0.1, "--data-dir", corpus)
    code, out, _ = launch(*clipped, "--dry-run", "--json")
    assert code == 0
    assert "--lambda-max 0.1: S* = 0.004 is expected to take" in json.loads(out)["target_s_advice"]
    code, out, _ = launch(*clipped, "--max-steps", 2, "--output-dir", tmp_path / "run")
    assert code == 0
    assert "--lambda-max 0.1: S* = 0.004 is expected to take" in " ".join(out.split())


# Found by a probe


@pytest.fixture(scope="module")
def auto(launch, corpus, tmp_path_factory):
    """A run whose setpoint a probe finds; what the console showed, and the run folder."""
    folder = tmp_path_factory.mktemp("auto") / "run"
    flags = (*PROBED, "--target-s", "auto", "--max-time", "00:01:00:00", "--data-dir", corpus)
    code, out, err = launch(*flags, "--output-dir", folder)
    assert (code, err) == (0, ""), out
    return " ".join(out.split()), folder


def test_auto_says_what_it_costs_and_why_it_chose(auto):
    printed = auto[0]
    assert "a probe of 16 steps without lambda comes first, 100 % on top of the run's 16" in printed
    assert "S_free about" in printed
    assert "so that" in printed


def test_auto_stores_what_it_found_and_what_was_asked(auto):
    folder = auto[1]
    scu, training = read(folder, "scu_config.json"), read(folder, "training_config.json")
    target = scu["target_s"]
    assert 0.005 <= target <= 0.9
    assert scu["setpoint"] == training["control"]["target_s"] == target
    assert f"S* = {target:.2%}" in scu["auto"]["reason"]
    assert scu["auto"]["probe_steps"] == 16
    assert 0 < scu["auto"]["s_free"]["low"] <= scu["auto"]["s_free"]["s"] <= scu["auto"]["s_free"]["high"] < 1
    assert yaml.safe_load((folder / "config.yaml").read_text())["control"]["target_s"] == "auto"


def test_the_probe_counts_against_the_time_limit(auto):
    spent = read(auto[1], "scu_config.json")["auto"]["probe_time_s"]
    state = torch.load(auto[1] / "checkpoint-8" / "state.ckpt", weights_only=True)
    assert 0 < spent < state["callbacks"]["TimeLimit"]["time_elapsed"]["train"] < 3600


def test_a_probe_that_leaves_the_run_no_time_is_refused(launch, corpus, tmp_path):
    flags = ("--target-s", "auto", "--max-steps", 5000, "--max-time", "00:00:00:01")
    code, _, err = launch(*SMALL, *flags, "--data-dir", corpus, "--output-dir", tmp_path / "run")
    assert code == 2
    assert "--max-time 00:00:00:01: is used up by the probe of --target-s auto (500 steps)" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_probe_leaves_no_trace_in_the_history(auto):
    records = read(auto[1], "scu_history.json")
    assert [record["step"] for record in records] == list(range(2, 17, 2))
    assert {record["s_target"] for record in records} == {read(auto[1], "scu_config.json")["target_s"]}
    assert all(record["lambda"] > 0 for record in records)


def test_the_run_is_that_of_the_setpoint_given_as_a_number(auto, train):
    """Dropout draws from torch's generator at every step, so a probe that moved it would show."""
    folder = train(*PROBED, "--target-s", read(auto[1], "scu_config.json")["target_s"])
    one, other = ((f / "adapter_model.safetensors").read_bytes() for f in (auto[1], folder))
    assert one == other


def test_a_resumed_auto_run_takes_its_setpoint_along_and_does_not_probe(auto, launch, tmp_path):
    folder = auto[1]
    flags = ("--config", folder / "config.yaml", "--output-dir", tmp_path / "resumed")
    code, out, err = launch(*flags, "--resume-from-checkpoint", folder / "checkpoint-8")
    assert (code, err) == (0, "")
    assert "a probe of" not in out
    assert "going on from checkpoint-8 at step 8" in out
    assert read(tmp_path / "resumed", "scu_config.json")["auto"] == read(folder, "scu_config.json")["auto"]
    weights = [load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "resumed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("controller", ["none", "fixed", "cascade", "kl"])
def test_a_law_without_a_setpoint_needs_no_probe(launch, corpus, controller):
    argv = ("--data-dir", corpus, "--max-steps", 1000, "--target-s", "auto", "--controller", controller)
    code, out, _ = launch(*SMALL, *argv, "--eval-steps", 50, "--dry-run", "--json")
    assert (code, json.loads(out)["target_s"]) == (0, None)


def test_a_run_too_short_for_a_probe_is_refused_at_once(launch, corpus):
    for more in ((), ("--dry-run",)):
        code, _, err = launch(*SMALL, "--data-dir", corpus, "--target-s", "auto", "--max-steps", 9, *more)
        assert code == 2
        assert "--target-s auto: a probe takes 10 steps at least, and the run has 9" in err


def test_no_probe_is_needed_where_a_controller_is_given_as_an_object(corpus):
    keys = (
        "--config",
        Path(__file__).parents[2] / "configs" / "tiny.yaml",
        "--control.target_s",
        "auto",
        "--data.path",
        corpus,
    )
    request = cli.parse(["fit", *map(str, keys), "--data.block_size=64", "--data.batch_size=1"]).request
    assert prepare(request).seeks_setpoint
    assert not prepare(request, controller=control.build("pi", target_s=0.1)).seeks_setpoint


def test_a_probe_comes_first_where_no_setpoint_is_given(launch, corpus):
    argv = ("--model", "tiny-granite-h", "--accelerator", "cpu", "--data-dir", corpus, "--block-size", 64)
    code, out, err = launch(*argv, "--batch-size", 1, "--max-steps", 1000, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["target_s"] == "auto: a probe of 100 steps comes first"


# What is refused


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--stop-at-equilibrium", "--controller", "fixed"],
            "--stop-at-equilibrium: --controller fixed closes no loop",
        ),
        (
            ["--stop-at-equilibrium", "--measure", "factors", "--kp", "1", "--ki", "0.1"],
            "--stop-at-equilibrium: --measure factors: judges how far the weights moved by how far S rose from 0",
        ),
        (
            ["--stop-at-equilibrium", "--controller", "cascade"],
            "--stop-at-equilibrium: --controller cascade moves its own setpoint",
        ),
        (
            ["--measure", "factors", "--target-s", "auto", "--kp", "1", "--ki", "0.1"],
            "--measure factors: is not 0 before",
        ),
        (["--stop-at-equilibrium", "--target-s", "0.95"], "--target-s 0.95: its band of 10% reaches to 1"),
        (["--stop-at-equilibrium", "7"], "--stop-at-equilibrium 7: must be at least 8 ticks"),
        (
            ["--stop-at-equilibrium", "30", "--max-steps", "80", "--control-every", "4", "--target-s", "0.02"],
            "--stop-at-equilibrium 30: 80 steps have 20 ticks, so that it could never stop the run; set fewer, a",
        ),
        (
            ["--early-stopping", "3", "--max-steps", "80", "--eval-steps", "20"],
            "--early-stopping 3: 80 steps hold 3 validations before the last, so that it could never stop the run; set "
            "an --eval-steps of at most 19, fewer, or leave it out: the best adapter is kept anyway",
        ),
        (
            ["--stop-at-equilibrium", "--deadband", "0.01"],
            "--stop-at-equilibrium: --deadband 0.01: S that is held lies inside, where the law does not answer to it, "
            "and no run would stop; set --deadband 0",
        ),
        (
            ["--stop-at-equilibrium", "--controller", "original"],
            "--stop-at-equilibrium: --deadband 0.002, original's own: S that is held lies inside",
        ),
    ],
)
def test_what_cannot_be_found_never_settles_or_never_stops_is_refused(launch, argv, words):
    code, _, err = launch("--test-run", "--output-dir", "never", *argv)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


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
    assert "stops at equilibrium: S held 0.02 within 10% for 12 ticks" in printed
    assert f"equilibrium at step {metrics['steps']}" in printed
