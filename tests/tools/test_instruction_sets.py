"""The script that runs the tests under fewer instructions."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAILS = "import os\n\n\ndef test_fails():\n    assert os.environ['OMP_NUM_THREADS'] == '1'\n"
LIMITED = """import torch

def test_limited():
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    assert not torch.cpu.get_capabilities()["avx512_bf16"]
"""


@pytest.mark.parametrize(
    ("setting", "test", "found"),
    [("own", FAILS, "0 | 1"), pytest.param("SSE4", LIMITED, "1 | 0", marks=pytest.mark.slow)],
)
def test_a_setting_reaches_the_tests_and_what_fails_is_named(tmp_path, setting, test, found):
    (tmp_path / "test_it.py").write_text(test)
    line = [sys.executable, ROOT / "tools" / "instruction_sets.py", "--only", setting, "--threads", "2", "--", tmp_path]
    done = subprocess.run(line, capture_output=True, text=True)
    *_, row, _, _ = done.stdout.splitlines()
    assert row.startswith(f"| {setting} | 2 | {found} | "), done.stdout + done.stderr
    assert ("test_it::test_fails" in row) == (done.returncode == 1) == (test == FAILS)
