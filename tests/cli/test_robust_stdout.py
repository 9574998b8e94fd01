"""Standard streams that are closed, full or without a reader."""

import os
import subprocess
import sys

import pytest

WRITE = """
import sys
from granite_scu.cli.robust_stdout import robust_stdout, open_what_is_closed
open_what_is_closed()
with robust_stdout():
    for _ in range(3):
        print("a line", flush=True)
        print("a line", file=sys.stderr, flush=True)
file = open("ours.txt", "w")
file.write("ours")
file.close()
"""


@pytest.mark.parametrize("streams", [">&-", ">&- 2>&-", "<&- >&- 2>&-", "> /dev/full 2> /dev/full", "| true"])
def test_what_cannot_be_written_ends_nothing_and_leads_into_no_other_file(streams, tmp_path):
    shell = f"set -o pipefail; {sys.executable} -c '{WRITE}' {streams}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ours.txt").read_text() == "ours"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["fit", "--help"], ["report", "--help"]])
def test_an_answer_that_cannot_be_written_is_said(arguments):
    command = f"import sys; from granite_scu.cli.main import main; sys.exit(main({arguments}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", command], stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.returncode == 1
    assert done.stderr.decode() == "error: standard output: No space left on device; free some space\n"


def test_what_can_be_written_is_written(tmp_path):
    done = subprocess.run([sys.executable, "-c", WRITE], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == done.stderr == "a line\n" * 3
