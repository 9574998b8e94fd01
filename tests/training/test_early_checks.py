"""What a logger needs is asked for before anything else."""

import sys

import pytest
from outcomes import refusal

from granite_scu.cli import requirements, script_flags, validate
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import LOGGERS, TINY_MODEL, RunConfig
from granite_scu.training import early_checks


def refused(*flags: str) -> str:
    arguments, _ = script_flags.translate(["--test-run", *flags])
    return refusal(validate.refuse, arguments)


@pytest.mark.parametrize("name", LOGGERS)
def test_one_that_is_not_installed_is_named_with_what_installs_it(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)  # so Python itself marks a module that is not to be had
    words = f"--logger {name}: {name} is not installed; pip install 'granite-scu[{name}]'"
    assert refused("--output-dir", str(tmp_path / "run"), "--logger", name) == words


def test_check_says_it_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    request = Request.from_dotted({"run.logger": "trackio", "base.name": TINY_MODEL, "trainer.accelerator": "cpu"})
    (found,) = (check for check in requirements.check_requirements(request) if check.name == "--logger")
    assert found.blocks and "pip install 'granite-scu[trackio]'" in found.remedy


def test_a_repeated_flag_adds_to_the_list():
    layers, _ = script_flags.translate(["--logger", "wandb", "--logger", "mlflow", "trackio"])
    assert layers.values["run.logger"] == ["wandb", "mlflow", "trackio"]


def test_wandbs_own_folder_is_no_installation(tmp_path, monkeypatch):
    (tmp_path / "some_logger").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(early_checks.NEEDED, "wandb", ("some_logger",))
    with pytest.raises(UserError, match="some_logger is not installed"):
        early_checks.check_loggers(["wandb"], offline=True)


@pytest.mark.parametrize("uri", ["./mlruns", "/srv/mlruns", "file:///srv/mlruns", "foo://x"])
def test_what_mlflow_cannot_write_to_are_refused(uri, monkeypatch):
    monkeypatch.setitem(early_checks.NEEDED, "mlflow", ())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UserError, match=f"MLFLOW_TRACKING_URI {uri}: is neither a server"):
        early_checks.check_loggers(["mlflow"], offline=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "oracle://me:pass@word@db/mlflow")
    with pytest.raises(UserError, match=r"oracle://\*\*\*@db/mlflow: is neither"):
        early_checks.check_loggers(["mlflow"], offline=False)
    for good in ("sqlite:///mlflow.db", "https://mlflow.example", "postgresql+psycopg2://me@db/mlflow"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", good)
        early_checks.check_loggers(["mlflow"], offline=False)


def test_an_unknown_one_is_refused_and_several_are_taken_each_once():
    with pytest.raises(UserError, match="--logger comet: there are wandb, mlflow, trackio"):
        RunConfig(logger=["wandb", "comet"])
    assert RunConfig(logger=["wandb", "mlflow", "wandb"]).loggers == ["wandb", "mlflow"]
    assert RunConfig(logger="trackio").loggers == ["trackio"]
    assert RunConfig().loggers == []
