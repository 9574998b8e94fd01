"""wandb, mlflow and trackio for real: a run on this machine, continued, read back through each library."""

import json
import os
import re
import struct
import sys
from pathlib import Path

import pytest

from granite_scu.storage.run_folder import RunFolder

pytestmark = pytest.mark.slow

LOGGERS = ("wandb", "mlflow", "trackio")
FLAGS = ("--test-run", "--samples", 0, "--precision", "fp32", "--batch-size", 2, "--block-size", 64)
FLAGS += ("--eval-batch-size", 16, "--eval-iters", 2, "--control-every", 1, "--save-steps", 2, "--eval-steps", 2)
SECRET = "0123456789abcdef" * 2 + "01234567"
SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "TRACKIO_WRITE_TOKEN")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def run(command, corpus, home):
    """Runs the command, with a home of its own and secrets in the environment; returns what it did."""

    def start(*argv, **environment):
        fixed = {"HOME": str(home), "TRACKIO_DIR": str(home / "trackio"), **dict.fromkeys(SECRETS, SECRET)}
        return command("-m", "granite_scu", "train", *FLAGS, "--data-dir", corpus, *argv, **(fixed | environment))

    return start


@pytest.fixture(scope="module")
def runs(run, tmp_path_factory):
    """A run of four steps with all three loggers, its ids, and what it printed when it was continued to six."""
    for name in LOGGERS:
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("logged") / "run"
    first = run("--max-steps", 4, "--output-dir", folder, "--logger", "wandb", "mlflow", "--logger", "trackio")
    assert first.returncode == 0, first.stderr
    ids = json.loads((folder / "logs" / "loggers.json").read_text())
    again = run("--max-steps", 6, "--output-dir", folder, "--resume-from-checkpoint", "last")
    assert again.returncode == 0, again.stderr
    return folder, ids, first.stdout + first.stderr + again.stdout + again.stderr


def ticks(folder: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of a field of the history."""
    return [(record["step"], record[name]) for record in json.loads((folder / "scu_history.json").read_text())]


def test_a_continued_run_is_the_same_run(runs):
    folder, ids, printed = runs
    assert set(ids) == set(LOGGERS)
    assert json.loads((folder / "logs" / "loggers.json").read_text()) == ids
    for name, identity in ids.items():
        assert printed.count(f"logging to {name}: run {identity}") == 2


@pytest.mark.parametrize("field", ["s", "lambda", "data_bpt"])
def test_mlflow_has_the_values_at_their_steps(runs, field):
    from mlflow.tracking import MlflowClient

    folder, ids, _ = runs
    client = MlflowClient(f"sqlite:///{folder}/logs/mlflow/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'granite-scu'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.info.status, found.info.run_name) == (ids["mlflow"], "FINISHED", "run")
    history = client.get_metric_history(ids["mlflow"], f"scu/{field}")
    assert sorted((metric.step, metric.value) for metric in history) == ticks(folder, field)
    settings = json.loads((folder / "scu_config.json").read_text())
    assert found.data.params["scu_config/n_tokens"] == str(settings["n_tokens"])
    assert found.data.params["data/block_size"] == "64"


@pytest.mark.parametrize("field", ["s", "lambda", "data_bpt"])
def test_trackio_has_the_values_at_their_steps(runs, home, monkeypatch, field):
    monkeypatch.setenv("TRACKIO_DIR", str(home / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads the variable once
    import trackio

    folder, ids, _ = runs
    (found,) = trackio.Api().runs("granite-scu")
    assert found.name == ids["trackio"]
    assert found.config["data"]["block_size"] == 64
    logged = trackio.sqlite_storage.SQLiteStorage.get_logs("granite-scu", found.name)
    values = [(entry["step"], entry[f"scu/{field}"]) for entry in logged if f"scu/{field}" in entry]
    assert values == ticks(folder, field)


@pytest.mark.parametrize("field", ["s", "lambda", "data_bpt"])
def test_wandb_has_the_values_at_their_steps(runs, field):
    folder, ids, _ = runs
    files = sorted((folder / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{ids['wandb']}.wandb"] * 2
    values, codes, keys = [], [], set()
    for record in (record for path in files for record in wandb_records(path)):
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if f"scu/{field}" in row:
                values.append((row["trainer/global_step"], row[f"scu/{field}"]))
        if record.HasField("run"):
            assert record.run.project == "granite-scu"
            keys |= {update.key for update in record.run.config.update}
        if record.HasField("exit"):
            codes.append(record.exit.exit_code)
    assert values == ticks(folder, field)
    assert codes == [0, 0]
    assert {"scu_config", "data", "control"} <= keys


def wandb_records(path: Path):
    """The records of wandb's file, a LevelDB log of protocol buffers behind seven bytes."""
    from wandb.proto import wandb_internal_pb2

    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_no_secret_is_written_or_printed(runs, home):
    folder, _, printed = runs
    files = [path for root in (folder, home) for path in root.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in printed


def test_such_a_run_may_be_overwritten(runs):
    RunFolder(runs[0]).check(overwrite=True, resuming=False)


def test_a_lost_network_stops_no_training(run, tmp_path):
    for name in LOGGERS[:2]:
        pytest.importorskip(name)
    nowhere = "http://127.0.0.1:9"
    quick = {"WANDB_INIT_TIMEOUT": "4", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "WANDB_BASE_URL": nowhere}
    address = nowhere.replace("//", "//me:a-password@")
    flags = ("--max-steps", 2, "--output-dir", tmp_path / "run", "--logger", "wandb", "mlflow")
    done = run(*flags, "--run.logger_offline", "false", MLFLOW_TRACKING_URI=address, **quick)
    assert done.returncode == 0, done.stderr
    printed = " ".join((done.stdout + done.stderr).split())
    for name in LOGGERS[:2]:
        assert re.search(f"--logger {name}: .*no more goes there, TensorBoard and CSV have everything", printed)
    assert (tmp_path / "run" / "scu_metrics.json").is_file()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"a-password" in path.read_bytes() or SECRET.encode() in path.read_bytes()]
    assert "a-password" not in printed and SECRET not in printed


def test_who_is_not_logged_in_is_told_at_once(command, corpus, tmp_path):
    pytest.importorskip("wandb")
    environment = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    flags = (*FLAGS, "--data-dir", corpus, "--output-dir", tmp_path / "run", "--logger", "wandb")
    done = command("-m", "granite_scu", "train", *flags, "--run.logger_offline", "false", **environment)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--logger wandb: nobody is logged in; log in with: wandb login" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_store_that_is_lost_during_the_run_is_said_once(tmp_path, caplog):
    pytest.importorskip("mlflow")
    from granite_scu.training.loggers import Place, RunLogger

    (tmp_path / "logs").mkdir()
    logger = RunLogger("mlflow")
    assert logger.open(Place(tmp_path / "logs", "run", None, {"lora": {"rank": 4}}, offline=True))
    logger.log_metrics({"scu/s": 0.1}, 1)
    os.truncate(tmp_path / "logs" / "mlflow" / "mlflow.db", 5000)
    for step in (2, 3):
        logger.log_metrics({"scu/s": 0.1}, step)
    logger.close("success")
    assert [message.startswith("--logger mlflow: ") for message in caplog.messages if "--logger" in message] == [True]
