"""Runs of the whole product: in this process where that will do, and as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_granite_cuda.py"
TEST_RUN_CONFIG = ROOT / "configs" / "tiny.yaml"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory, monkeypatch):
    """No test writes into the checkout or asks the hub."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """Runs a command of this Python as a user does; returns what it printed and its exit code."""
    where = tmp_path_factory.mktemp("command")

    def run(*arguments, **more_environment) -> subprocess.CompletedProcess:
        # One thread, so that two runs add in the same order; no GPU and no hub, so that every machine sees the same.
        fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        environment = os.environ | fixed | more_environment
        line = [sys.executable, *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, cwd=where, env=environment)

    return run


@pytest.fixture(scope="session")
def script(command):
    """Runs the script with flags; ``test_run`` and ``train`` are the same in this process, and faster."""
    return lambda *argv, **environment: command(SCRIPT, *argv, **environment)


@pytest.fixture
def launch(capfd):
    """Runs the script's ``main`` in this process; returns exit code, stdout and stderr."""
    from granite_scu.cli import script_flags

    def run(*argv) -> tuple[int, str, str]:
        capfd.readouterr()
        code = script_flags.main(TEST_RUN_CONFIG, [str(argument) for argument in argv])
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A short text file of prose about Python, a few thousand tokens."""
    from granite_scu.data.sources.corpora import stdlib_docs

    text = "\n\n".join(document.text for document in stdlib_docs())
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(text[:30_000], encoding="utf-8")
    return path


@pytest.fixture
def train(launch, corpus, tmp_path):
    """Trains the embedded model on the short corpus for a few steps, and returns the run folder."""
    folders = (tmp_path / f"run{number}" for number in range(100))

    def run(*argv) -> Path:
        folder = next(folders)
        few = ("--max-steps", "4", "--control-every", "1", "--precision", "fp32", "--data-dir", corpus)
        code, out, err = launch("--test-run", *few, "--output-dir", folder, *argv)
        assert (code, err) == (0, ""), out + err
        return folder

    return run
