"""Tutorials whose outputs are made by running them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "run_tutorial.py"
spec = importlib.util.spec_from_file_location("run_tutorial", TOOL)
run_tutorial = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_tutorial)

PAGE = """Text.

```console
$ echo one > file; cat file; echo "> cat"
one
> an older answer
$ python -c "print(1)
> print(2)"
```

<!-- exit 3 -->
<!-- lines 3 -->
```console
$ cat file; seq 9; exit 3
```
"""


def test_a_pages_commands_run_in_one_folder_and_what_they_print_stands_under_them(tmp_path):
    page, failures = run_tutorial.renewed(PAGE, tmp_path)
    assert not failures
    assert 'cat file; echo "> cat"\none\n> cat\n$ python' in page
    assert '> print(2)"\n1\n2\n```' in page
    assert "$ cat file; seq 9; exit 3\none\n1\n...\n9\n```\n" in page
    assert run_tutorial.renewed(page, tmp_path)[0] == page
    edited = page.replace("...", "2")
    assert run_tutorial.sealed(page) == page and run_tutorial.sealed(edited) != edited


def test_a_command_that_ends_otherwise_is_a_failure_and_leaves_the_page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("```console\n$ false\n```\n")
    done = subprocess.run([sys.executable, TOOL, path], capture_output=True, text=True)
    assert done.returncode == 1 and "ended with exit code 1 and not 0" in done.stderr
    assert path.read_text() == "```console\n$ false\n```\n"


def test_nobody_has_edited_what_commands_printed():
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    assert sum("```console" in page for page in pages) >= 1
    assert all(run_tutorial.sealed(page) == page for page in pages), "run tools/run_tutorial.py"


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_the_tutorials_commands_do_what_they_say(page):
    done = subprocess.run([sys.executable, TOOL, "--check", page], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
