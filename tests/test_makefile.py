"""What the Makefile does on a machine, with a Python in its environment that only takes notes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def make(tmp_path):
    """Runs make in a folder whose environment's Python notes its arguments; gives what make said, and the notes."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "touch", "uname", "test", "echo", "rm", "make"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$*" >> notes\n')
    python.chmod(0o755)

    def run(*arguments: str, driver: bool = False) -> tuple[str, list[str]]:
        if driver:
            (tmp_path / "bin" / "nvidia-smi").symlink_to(shutil.which("true"))
        environment = {"PATH": str(tmp_path / "bin")}
        done = subprocess.run(["make", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout, (tmp_path / "notes").read_text().splitlines()

    return run


def test_without_an_nvidia_driver_pytorch_is_the_one_for_the_cpu(make):
    said, (torch, ours) = make("setup", driver=False)
    assert "no NVIDIA driver here" in said
    assert torch.endswith("--no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch")
    assert ours.endswith("-e .[quant,dev]") and "index" not in ours


def test_with_a_driver_it_is_that_of_pip(make):
    _, (ours,) = make("setup", driver=True)
    assert ours.endswith("-e .[quant,dev]")


@pytest.mark.parametrize("target", ["train-4090", "train-cpu"])
def test_without_args_it_says_what_it_trains_on(make, target):
    said, notes = make(target, driver=True)
    assert f'on your text: make {target} ARGS="--data-dir my_texts/"' in said
    assert notes[-1].startswith("scripts/train_granite_cuda.py --hardware ")
    assert "wikitext" not in make(target, "ARGS=--data-dir mine")[0]


def test_demo_chat_trains_the_model_that_it_fetches_on_files_that_are_there(make):
    _, (*_, fetched, trained) = make("demo-chat")
    words = trained.split()
    files = [word for word in words if word.endswith(".jsonl")]
    assert len(files) == 3 and all((ROOT / file).is_file() for file in files)
    assert words[words.index("--model") + 1] == fetched.split()[-1]
