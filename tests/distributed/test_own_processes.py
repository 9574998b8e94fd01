"""The processes that Lightning starts itself, as it does under ``--multi-gpu`` on a machine with several GPUs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import killing
import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = """
import sys, time
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from granite_scu.cli.main import main
from granite_scu.export import present
from granite_scu.hardware import machine
written = present.report
present.report = lambda folder: (written(folder), time.sleep(12))  # as of a long run
machine.processes_for = lambda multi_gpu, kind, gpus: (2, 1)  # as if the CPU were two GPUs
_ChildProcessObserver.__init__.__defaults__ = (0.02,)  # Lightning looks for lost processes every five seconds
sys.exit(main(["train", *sys.argv[1:]]))
"""
FLAGS = (
    *("--test-run", "--precision", "fp32", "--block-size", 64, "--batch-size", 2, "--eval-iters", 4, "--multi-gpu"),
    *("--accelerator", "cpu", "--max-steps", 500, "--eval-steps", 500, "--control-every", 3),
)


@pytest.fixture
def start(tmp_path):
    """Starts a run; returns the process and its folder."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(*flags) -> tuple[subprocess.Popen, Path]:
        line = [sys.executable, tmp_path / "script.py", *FLAGS, *flags, "--output-dir", tmp_path / "run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(list(map(str, line)), env=environment, **pipes), tmp_path / "run"

    return start


def test_a_signal_to_the_first_saves_and_ends_both_in_order(start):
    process, folder = start()
    killing.until(lambda: killing.ticks(folder) >= 2)
    process.send_signal(signal.SIGTERM)
    words, _ = process.communicate(timeout=120)
    assert process.returncode == 143, words
    assert words.count("stopped by SIGTERM after step") == 1
    assert (folder / "report.html").is_file()


def test_a_run_that_fails_says_why(start):
    """Each process finds out, and the first must not be killed for the end of the second before it has spoken."""
    process, _ = start("--learning-rate", "1e15", "--gradient-clip", 0, "--warmup-steps", 0)
    words, _ = process.communicate(timeout=240)
    assert process.returncode == 1, words
    assert "not finite in" in words
