"""The step test as a user starts it, on the embedded model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from granite_scu.control import PI
from research.identification import step_test as command
from research.identification.command import main
from research.identification.fopdt import Fopdt, simulate
from research.identification.settings import StepTest
from research.identification.simc import effective, simc

TEST_RUN_CONFIG = Path(__file__).parents[3] / "configs" / "tiny.yaml"

FEW = (
    *("--control.every=1", "--data.block_size=32", "--data.batch_size=2", "--trainer.precision=32-true"),
    *("--trainer.limit_val_batches=1", "--step_test.settle=6", "--step_test.ticks=26", "--step_test.dwell=2"),
)


@pytest.fixture
def identify(capfd, corpus, tmp_path):
    """Runs the command in this process; returns exit code, stdout, stderr and the folder."""

    def run(*argv):
        capfd.readouterr()
        where = (f"--data.path={corpus}", f"--run.output_dir={tmp_path / 'tune'}")
        code = main(["--config", str(TEST_RUN_CONFIG), *where, *argv])
        printed = capfd.readouterr()
        return code, printed.out, printed.err, tmp_path / "tune"

    return run


@pytest.mark.slow
def test_a_step_test_too_noisy_proposes_nothing_or_something_and_says_which(identify):
    """With 20 noisy ticks either may come out; what must hold is that files, words and exit code agree."""
    code, out, _, folder = identify(*FEW, "--step_test.verify=false", "--json")
    result = json.loads((folder / "identification.json").read_text())
    assert json.loads(out) == result
    assert code == (1 if result["objection"] else 0)
    assert ("gains" in result) == (result["objection"] is None)
    assert result["verification"] is None
    assert len(result["excitation"]["log_s"]) == 26
    assert (folder / "identification.png").is_file() and (folder / "identification.svg").is_file()
    assert (folder / "excitation" / "scu_history.json").is_file()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--step_test.amplitude=0"], "--step_test.amplitude 0.0: must be positive"),
        (["--step_test.amplitude=-1"], "--step_test.amplitude -1.0: must be positive"),
        (["--step_test.amplitude=1000"], "--step_test.amplitude 1000.0: must be positive and at most 20"),
        (["--step_test.ticks=40"], "--step_test.ticks 40: too short for the excitation"),
        (["--step_test.step=60"], "--step_test.step 60.0: must be a factor of 0.1 to 10, at least a tenth away from 1"),
        (["--step_test.step=1e-300"], "--step_test.step 1e-300: must be a factor of 0.1 to 10"),
        (["--step_test.step=8", "--control.target_s=0.2"], "--step_test.step 8.0: takes S* 0.2 beyond 1"),
        (
            ["--control.lambda_min=1", "--control.lambda_max=2", "--control.lambda_init=1"],
            "--control.lambda_min 1, --control.lambda_max 2: leave no room for steps of --step_test.amplitude 0.5",
        ),
        (["--control.controller=fixed"], "--control.controller fixed: identify finds gains of pi"),
        (["--control.kp=-1"], "--control.kp -1.0: must be positive and finite"),
        (
            ["--control.controller=pid"],
            "--control.controller pid: no controller is called 'pid'; there are none, fixed, linear",
        ),
    ],
)
def test_a_wrong_request_is_one_line(identify, argv, words):
    code, out, err, folder = identify(*argv)
    assert code == 2
    assert words in err and err.count("\n") == 1 and not out
    assert not folder.exists()


def test_without_a_setpoint_the_line_asks_for_one(capfd, corpus, tmp_path):
    where = ("--base.name=tiny-granite-h", f"--data.path={corpus}", f"--run.output_dir={tmp_path / 'tune'}")
    assert main([*where, "--trainer.accelerator=cpu"]) == 2
    err = capfd.readouterr().err
    assert err == "error: --control.target_s: identify works at one operating point; give a ratio, for example 0.02\n"


@pytest.mark.parametrize("setpoint", [0.02, 0.3, 0.75])
def test_the_verification_is_as_long_as_the_law_takes_on_the_plant_that_it_meets(setpoint):
    """One plant in the logit of S, which in ln S moves by 1 - S of that."""
    plant = Fopdt(gain=-1.0, tau=20.0, theta=2.0)
    gains = simc(effective(plant), tau_c=20)
    law = PI(setpoint=setpoint, kp=gains.kp, ki=gains.ki)
    in_log_s = replace(plant, gain=plant.gain * (1 - setpoint))
    config = StepTest(ticks=600, step=1.2)
    assert command._follow(config, law, in_log_s) == 3 * 15


PLANT = Fopdt(gain=-1.15, tau=3.5, theta=0.55)
REST = (math.log(0.5), math.log(0.02))
"""(ln lambda, ln S) at which the simulated plant rests: S at S*, as after a rise that is over."""


def simulated(*plants):
    """Stands for training: the first run meets the first of the plants, and so on, under noise of 3 %."""
    met = iter(plants)

    def train(job, ticks):
        job.folder.path.mkdir(parents=True)
        noise = np.random.default_rng(job.request.seed).normal(0, 0.03, ticks)
        log_s, log_lam, outputs = simulate(job.controller, next(met), ticks, REST, noise)
        return [
            {"step": k + 1, "lambda": math.exp(u), "s": math.exp(y + n), "s_ema": output.smoothed}
            for k, (y, u, n, output) in enumerate(zip(log_s, log_lam, noise, outputs, strict=True))
        ]

    return train


SIMULATED = ("--control.lambda_init=0.5", "--step_test.ticks=90", "--step_test.settle=24", "--data.block_size=32")


def test_a_loop_that_behaves_as_predicted_is_said_to(identify, monkeypatch):
    monkeypatch.setattr(command, "_train", simulated(PLANT, PLANT))
    code, out, err, folder = identify(*SIMULATED)
    assert (code, err) == (0, "")
    result = json.loads((folder / "identification.json").read_text())
    assert result["as_predicted"] is True
    assert result["verdict"].startswith("the closed loop behaved as predicted: on its way S was ")
    assert "behaved as predicted" in out and "warning" not in out
    assert len(result["verification"]["predicted"]["response"]) == len(result["verification"]["log_s"]) - 24


def test_a_model_measured_far_from_the_setpoint_is_cautioned_of(identify, monkeypatch):
    monkeypatch.setattr(command, "_train", simulated(PLANT))
    asked = ("--control.target_s=0.01", "--control.lambda_max=0.5", "--control.lambda_min=0.1")  # S rests at 0.02
    code, out, _, folder = identify(*SIMULATED, *asked, "--step_test.verify=false")
    result = json.loads((folder / "identification.json").read_text())
    assert any(caution.startswith("S was 2") for caution in result["cautions"])
    assert code == 0 and "warning: S was 2" in out


def test_a_loop_that_oscillates_is_a_warning_and_no_failure(identify, monkeypatch):
    """Between the two runs the plant becomes six times as responsive, so that the gains are too large for it."""
    monkeypatch.setattr(command, "_train", simulated(PLANT, replace(PLANT, gain=6 * PLANT.gain)))
    code, out, err, folder = identify(*SIMULATED, "--json")
    result = json.loads((folder / "identification.json").read_text())
    assert json.loads(out) == result
    assert code == 0
    assert result["as_predicted"] is False
    assert result["verdict"].startswith("the closed loop did not behave as predicted: ")
    assert "then it swung" in result["verdict"] and "before the step too" in result["verdict"]
    assert f"warning: {result['verdict']}" in err
    agreement = result["verification"]["agreement"]
    assert agreement["difference"]["swing"] > agreement["allowed"]["swing"]


def test_gains_that_were_not_tried_are_neither_as_predicted_nor_not(identify, monkeypatch):
    monkeypatch.setattr(command, "_train", simulated(PLANT))
    code, _, _, folder = identify(*SIMULATED, "--step_test.verify=false")
    result = json.loads((folder / "identification.json").read_text())
    assert (code, result["as_predicted"]) == (0, None)
    assert result["verdict"] == "gains are proposed and have not been tried"


@pytest.mark.slow
def test_the_whole_experiment_on_the_embedded_model(capfd, tmp_path):
    folder = tmp_path / "tune"
    settings = (f"--run.output_dir={folder}", "--step_test.ticks=90", "--step_test.settle=24")
    assert main(["--config", str(TEST_RUN_CONFIG), *settings]) == 0
    assert "--kp" in capfd.readouterr().out
    result = json.loads((folder / "identification.json").read_text())
    assert result["model"]["gain"]["value"] + 2 * result["model"]["gain"]["standard_error"] < 0
    assert result["fit"]["r2"] > 0.5
    assert result["margins"]["stable"]
    assert result["verification"]["measured"]["rise"] is not None
    assert result["as_predicted"], result["verdict"]
