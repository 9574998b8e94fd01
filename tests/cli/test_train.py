"""The command that continues a run."""

from pathlib import Path

from granite_scu.cli.train import to_continue


def test_the_command_that_continues_a_run_names_its_folder(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert to_continue(Path("my run")) == "granite-scu train --output-dir 'my run' --resume-from-checkpoint last"


def test_the_words_of_a_launcher_are_not_known(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert to_continue(Path("runs/x")) == "the same command and --resume-from-checkpoint last"
