"""The one command: what it offers, how fast it says so, and what it says to a verb that there is not."""

import subprocess
import sys

import pytest

from granite_scu.cli.command_table import BY_NAME
from granite_scu.cli.main import build_parser, main

HEAVY = ("torch", "transformers", "lightning", "peft", "datasets")


@pytest.mark.parametrize("asked", [[], ["--help"]])
def test_the_overview_lists_every_command(capsys, asked):
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("  ") and "granite-scu" not in line] == [
        *BY_NAME
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "trian: no such command; did you mean train? there are check, hardware,"),
        (["--data-dir", "x"], "--data-dir: comes after a command, as in: granite-scu train --data-dir"),
        (["runs", "--sort_", "time"], "unrecognized arguments: --sort-"),
        (["runs", ""], "DIR '': must be the name of a file or folder, and not empty"),
        (["report", ""], "RUN '': must be"),
        (["report", "mine", "--out", ""], "--out '': must be"),
        (["plot", "mine", "--out="], "--out '': must be"),
        (["publish", "", "--repo-id", "me/mine"], "RUN '': must be"),
        (["merge", "mine", "--out", ""], "--out '': must be"),
        (["generate", ""], "RUN '': must be"),
        (["eval", "mine", "--csv", ""], "--csv '': must be"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(capsys, arguments, words):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["eval", "--csv=~/here"], "csv"),
        (["eval", "--output=~/here"], "output"),
        (["report", "mine", "--out=~/here"], "out"),
        (["plot", "mine", "--out=~/here"], "out"),
        (["publish", "--repo-id", "me/mine", "~/here"], "run"),
    ],
)
def test_the_home_folder_is_known_to_every_path(monkeypatch, tmp_path, arguments, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    command, *rest = arguments
    assert getattr(build_parser(command).parse_args(rest), name) == tmp_path / "here"


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_a_rank_that_is_no_number_is_refused_before_lightning_reads_it(capsys, monkeypatch, name):
    monkeypatch.setenv(name, "abc")
    assert main(["check", "--test-run"]) == 2
    assert f"error: {name}=abc: must be a whole number" in capsys.readouterr().err


def test_without_docstrings_it_says_why_it_cannot_run():
    command = [sys.executable, "-OO", "-m", "granite_scu", "train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "-OO" in done.stderr and done.stderr.count("\n") == 1


def test_the_whole_help_of_fit_has_its_preset_and_every_key(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help-all"])
    shown = capsys.readouterr().out
    assert "--hardware CARD" in shown and "--control.lambda_init" in shown and "--trainer.max_steps" in shown


def test_the_help_of_each_command_has_three_examples_and_loads_nothing_heavy():
    """In one process of its own: what this one has loaded says nothing."""
    code = f"""
import contextlib, io, sys
from granite_scu.cli.main import build_parser, main
for name in {[*BY_NAME]!r}:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([name, "--help"])
    text = shown.getvalue()
    assert text.startswith(f"usage: granite-scu {{name}} "), text
    examples = sum(line.startswith(f"  granite-scu {{name}}") for line in text.splitlines())
    assert examples >= 3, (name, examples)
assert not [name for name in {HEAVY!r} if name in sys.modules], sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
