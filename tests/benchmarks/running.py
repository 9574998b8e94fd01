"""How the tests start a benchmark: as a user does, with one thread."""

import io
import json
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from granite_scu.hardware.detection import peak_memory, reset_peak_memory

ROOT = Path(__file__).parents[2]
KNOWS_PEAKS = None not in (reset_peak_memory("cpu"), peak_memory("cpu"))
"""Whether this system tells the most memory that a process has had; some sandboxes do not."""

FIELDS = {
    "case", "ours_s", "theirs_s", "speedup", "ours_extra_gb", "theirs_extra_gb", "memory_ratio", "max_rel_err",
    "reason",
}  # fmt: skip


def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


def cases(name: str, *arguments: str) -> list[dict]:
    """What it prints with --json on the CPU, every field that all have in place and every side measured."""
    ran = run(name, "--json", "--device", "cpu", *arguments)
    assert ran.returncode == 0 and ran.stderr.strip() == "", ran.stderr
    found = json.loads(ran.stdout)
    assert found
    for case in found:
        assert case.keys() >= FIELDS
        assert case["reason"] is None
        assert case["ours_s"] > 0 and case["theirs_s"] > 0
        assert not KNOWS_PEAKS or (case["ours_extra_gb"] > 0 and case["theirs_extra_gb"] > 0)
        assert abs(case["speedup"] - case["theirs_s"] / case["ours_s"]) < 1e-9
    return found


def refuses(name: str, arguments: list[str], said: str) -> None:
    """It says what is wrong in one line and ends with code 2: in this process, which has imported torch.

    ``name`` is of a benchmark, or the path of another program.
    """
    path = str(ROOT / ("" if "/" in name else "benchmarks") / f"{name}.py")
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [path, *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = argv
    assert ended.value.code == 2
    assert out.getvalue() == "" and err.getvalue().count("\n") == 1 and said in err.getvalue(), err.getvalue()
