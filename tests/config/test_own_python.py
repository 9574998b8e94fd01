"""No process that the program starts runs a file of the current folder."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from granite_scu.config import own_python

PACKAGE = Path(own_python.__file__).parents[1]
PLANTED = "import pathlib; pathlib.Path('was_run').touch()\n"


@pytest.fixture
def strangers_folder(tmp_path, monkeypatch):
    """The current folder, with files that are named as modules of the standard library."""
    for name in ("json", "socket", "runpy", "pickle", "psutil", "tempfile"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_process_of_our_own_imports_what_this_one_does_and_nothing_from_the_current_folder(strangers_folder):
    code = (
        "import json, sys, psutil, granite_scu; print(json.dumps([granite_scu.__file__, psutil.__file__, *sys.argv]))"
    )
    done = subprocess.run(own_python.command(code, "x"), capture_output=True, text=True)
    expected = [str(PACKAGE / "__init__.py"), psutil.__file__, "-c", "x"]
    assert (done.stdout.strip(), done.stderr) == (json.dumps(expected), "")
    assert not (strangers_folder / "was_run").exists()


def test_every_process_is_started_so():
    """What names the interpreter is that one function, or has Python isolated."""
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        isolated = source.count('sys.executable, "-I"') + source.count("sys.executable, *ISOLATED")
        assert source.count("sys.executable") == isolated, file


@pytest.mark.parametrize(
    "command",
    [["-m", "granite_scu", "train", "--test-run"], ["scripts/train_granite_cuda.py"], ["scripts/eval_bpt.py"]],
)
def test_a_python_without_the_dependencies_is_told_where_they_are(command):
    bare = [sys.executable, "-I", "-S"]  # neither packages nor the paths of a virtual environment
    start = f"import sys, runpy; sys.path.insert(0, {str(PACKAGE.parent)!r}); sys.argv = {command[-1:]!r} + ['x']; "
    start += "runpy.run_module('granite_scu', run_name='__main__')"
    done = subprocess.run(
        [*bare, "-c", start] if command[0] == "-m" else [*bare, command[0]],
        **{"capture_output": True, "text": True, "cwd": PACKAGE.parent},
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "lacks the dependencies" in done.stderr and ".venv/bin/activate" in done.stderr
