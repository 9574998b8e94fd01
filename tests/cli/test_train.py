"""What a command of settings prints by itself: the scores, and the command that continues a run."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from granite_scu.cli import script_flags, train
from granite_scu.cli.train import to_continue


def run(folder: str, controller: str = "pi", callbacks: object = None) -> SimpleNamespace:
    trainer = SimpleNamespace(callbacks=callbacks, logger=None)
    request = SimpleNamespace(control=SimpleNamespace(controller=controller), trainer=trainer)
    return SimpleNamespace(folder=SimpleNamespace(path=Path(folder)), request=request)


@pytest.mark.parametrize("command", ["validate", "test"])
def test_scores_are_json_and_nothing_else_whatever_the_terminal(monkeypatch, capsys, command):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(train, "_score", lambda request, split: {"split": split, "adapter_bpt": 5.0})
    layers, _ = script_flags.translate(["--model", "tiny-granite-h", "--data-dir", "stdlib-docs"])
    assert train.run(layers, command) == 0
    assert json.loads(capsys.readouterr().out) == {"split": train.SCORED[command], "adapter_bpt": 5.0}


def test_the_command_that_continues_a_run_names_its_folder_and_code_of_ones_own(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    line = "granite-scu train --output-dir 'my run' --resume-from-checkpoint last"
    assert to_continue(run("my run")) == line
    assert to_continue(run("my run", "mine.laws:Law")) == f"{line} --controller mine.laws:Law"
    assert to_continue(run("my run", callbacks=[{"class_path": "mine.Callback"}])) == f"{line} --config FILE"


def test_the_words_of_a_launcher_are_not_known(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert to_continue(run("runs/x")) == "the same command and --resume-from-checkpoint last"
