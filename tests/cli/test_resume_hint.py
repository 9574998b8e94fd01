"""The command that continues a run."""

import sys

import pytest

from granite_scu.cli import resume_hint

SCRIPT = ["python", "scripts/train_granite_cuda.py"]


@pytest.mark.parametrize(
    ("started", "words", "expected"),
    [
        (SCRIPT, "--test-run --overwrite", "python scripts/train_granite_cuda.py --test-run --output-dir"),
        (
            SCRIPT,
            "--output_dir old --resume-from-checkpoint=old/checkpoint-4 --max-steps 9",
            "python scripts/train_granite_cuda.py --max-steps 9 --output-dir",
        ),
        (["python", "/usr/bin/granite-scu"], "train --data-dir a b", "granite-scu train --data-dir a b --output-dir"),
        (
            ["python", "-m", "granite_scu"],
            "fit --config c.yaml --run.overwrite=true --run.resume old",
            "python -m granite_scu fit --config c.yaml --run.output_dir",
        ),
    ],
)
def test_it_is_the_words_that_started_it(monkeypatch, started, words, expected):
    program = "granite_scu/__main__.py" if "-m" in started else started[-1]
    monkeypatch.setattr(sys, "argv", [program, *words.split()])
    monkeypatch.setattr(sys, "orig_argv", [*started, *words.split()])
    flag = "--run.resume" if words.startswith("fit") else "--resume-from-checkpoint"
    assert resume_hint.command("my run") == f"{expected} 'my run' {flag} last"


def test_the_words_of_a_launcher_are_not_known(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/train_granite_cuda.py", "--multi-gpu"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resume_hint.command("runs/x") == "the same command and --resume-from-checkpoint last"
