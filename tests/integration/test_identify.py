"""The step test as a user starts it, on the embedded model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from granite_scu import cli
from granite_scu import identify as command
from granite_scu.config import IdentifyConfig
from granite_scu.control import PI, identification

TEST_RUN_CONFIG = Path(__file__).parents[2] / "configs" / "tiny.yaml"

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
        code = cli.main(["identify", "--config", str(TEST_RUN_CONFIG), *where, *argv])
        printed = capfd.readouterr()
        return code, printed.out, printed.err, tmp_path / "tune"

    return run


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
        (["--step_test.step=60"], "--step_test.step 60.0: takes S* 0.02 beyond 1"),
        (["--control.target_s=auto"], "--control.target_s: identify works at one operating point; give a ratio"),
        (["--control.controller=fixed"], "--control.controller fixed: identify finds gains of pi"),
    ],
)
def test_a_wrong_request_is_one_line(identify, argv, words):
    code, out, err, folder = identify(*argv)
    assert code == 2
    assert words in err and err.count("\n") == 1 and not out
    assert not folder.exists()


def test_without_a_setpoint_the_line_asks_for_one(capfd, corpus, tmp_path):
    where = ("--base.name=tiny-granite-h", f"--data.path={corpus}", f"--run.output_dir={tmp_path / 'tune'}")
    assert cli.main(["identify", *where, "--trainer.accelerator=cpu"]) == 2
    err = capfd.readouterr().err
    assert err == "error: --control.target_s: identify works at one operating point; give a ratio, for example 0.02\n"


@pytest.mark.parametrize("setpoint", [0.02, 0.3, 0.75])
def test_the_verification_is_as_long_as_the_law_takes_on_the_plant_that_it_meets(setpoint):
    """One plant in the logit of S, which in ln S moves by 1 - S of that."""
    plant = identification.Fopdt(gain=-1.0, tau=20.0, theta=2.0)
    gains = identification.simc(identification.effective(plant), tau_c=20)
    law = PI(setpoint=setpoint, kp=gains.kp, ki=gains.ki)
    in_log_s = replace(plant, gain=plant.gain * (1 - setpoint))
    config = IdentifyConfig(ticks=600, step=1.2)
    assert command._follow(config, law, in_log_s) == 3 * 15


@pytest.mark.slow
def test_the_whole_experiment_on_the_embedded_model(capfd, tmp_path):
    folder = tmp_path / "tune"
    settings = (f"--run.output_dir={folder}", "--step_test.ticks=90", "--step_test.settle=24")
    assert cli.main(["identify", "--config", str(TEST_RUN_CONFIG), *settings]) == 0
    assert "--kp" in capfd.readouterr().out
    result = json.loads((folder / "identification.json").read_text())
    assert result["model"]["gain"]["value"] + 2 * result["model"]["gain"]["standard_error"] < 0
    assert result["fit"]["r2"] > 0.5
    assert result["margins"]["stable"]
    assert result["verification"]["measured"]["rise"] is not None
