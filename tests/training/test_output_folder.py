"""The run folder at the start of a run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.training.output_folder import locked_run_folder, open_run_folder, training_config
from granite_scu.training.recipe import prepare

pytestmark = pytest.mark.usefixtures("no_step_is_tried")


@pytest.fixture
def settings(tmp_path):
    """Of a run of four steps into ``run``."""
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"Line {number} of a text.\n" for number in range(300)))
    settings = {"base.name": "tiny-granite-h", "data.path": str(text), "data.block_size": 32, "trainer.max_steps": 4}
    more = {"run.output_dir": str(folder), "trainer.accelerator": "cpu", "control.target_s": 0.02, "control.every": 2}
    return settings | more


def test_an_attempt_without_a_checkpoint_makes_way_for_auto(settings, tmp_path):
    folder = tmp_path / "run"
    (folder / "best").mkdir(parents=True)
    for name in ("training_config.json", "scu_history.jsonl", "best/adapter_model.safetensors"):
        (folder / name).write_text(f"the first attempt's {name}")
    run = prepare(Request.from_dotted(settings | {"run.resume": "auto"}))
    with locked_run_folder(run):
        open_run_folder(run)
    assert not (folder / "best").exists() and not (folder / "scu_history.jsonl").exists()
    assert (folder / "training_config.json").read_text().startswith("{")


def test_its_configuration_given_to_another_run_neither_continues_nor_replaces(settings, tmp_path):
    asked = {"run.resume": "auto", "run.overwrite": True}
    run = prepare(Request.from_dotted(settings | asked))
    with locked_run_folder(run):
        open_run_folder(run)
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["run"]
    assert (written["resume"], written["overwrite"]) == (None, False)


def test_what_a_run_that_continues_reads_from_its_file_is_not_given_by_the_user(settings, tmp_path):
    run = prepare(Request.from_dotted(settings))
    with locked_run_folder(run):
        open_run_folder(run)
    read = {"optimizer.learning_rate", "data.batch_size", "lora.dropout"}  # by the data, and by default
    request = run.request.with_values({"run.keep": 7, "lora.dropout": 0.1})
    request = replace(request, given=request.given | read | {"run.keep"})
    again = replace(run, request=request, resume=SimpleNamespace(path=tmp_path / "run" / "checkpoint-2"))
    assert {*training_config(again)["given"]} - {*training_config(run)["given"]} == {"run.keep", "lora.dropout"}


def test_a_run_that_auto_began_is_refused_where_it_has_checkpoints_by_now(settings, tmp_path):
    """As where a notebook trains once more what was interrupted."""
    run = prepare(Request.from_dotted(settings | {"run.resume": "auto"}))
    with locked_run_folder(run):
        open_run_folder(run)
    (tmp_path / "run" / "checkpoint-3").mkdir()
    with pytest.raises(UserError, match="has checkpoints since this run was prepared; prepare it again"):
        locked_run_folder(run).__enter__()


def test_a_run_that_ended_there_after_the_first_check_is_not_overwritten(settings, tmp_path):
    """Two runs start on one free folder; one of them trains while the other one still looks for its batch size."""
    folder = tmp_path / "run"
    late = prepare(Request.from_dotted(settings))
    folder.mkdir()
    (folder / "training_config.json").write_text("the other run's")
    locked = locked_run_folder(late)
    with pytest.raises(UserError, match="is not empty; choose another folder"), locked:
        open_run_folder(late)
    assert (folder / "training_config.json").read_text() == "the other run's"


def test_a_run_that_fails_before_it_writes_leaves_no_folder(settings, tmp_path):
    run = prepare(Request.from_dotted(settings))
    with pytest.raises(RuntimeError), locked_run_folder(run):
        raise RuntimeError
    assert not (tmp_path / "run").exists()
