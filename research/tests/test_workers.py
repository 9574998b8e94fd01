"""The processes that do runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = f"""
import os, sys, time
sys.path.append({str(ROOT)!r})
from research.workers import workers

if __name__ == "__main__":
    with workers(2, os.getpid) as pool:
        print(*pool.map(time.sleep, (0, 0)), *(process.pid for process in pool._processes.values()), flush=True)
        time.sleep(60)
"""


def test_no_worker_outlives_a_command_that_is_killed(tmp_path):
    (tmp_path / "command.py").write_text(COMMAND)
    command = subprocess.Popen([sys.executable, tmp_path / "command.py"], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in command.stdout.readline().split() if word != "None"]
    assert pids and all(map(psutil.pid_exists, pids))
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    deadline = time.monotonic() + 20
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no safe path")
def test_a_worker_imports_nothing_from_the_current_folder(tmp_path, tmp_path_factory, monkeypatch):
    for name in ("json", "socket", "runpy", "pickle", "psutil", "tempfile"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path('was_run').touch()\n")
    monkeypatch.chdir(tmp_path)
    script = tmp_path_factory.mktemp("elsewhere") / "command.py"
    script.write_text(COMMAND.replace("time.sleep(60)", "pass"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout.startswith("None None ") and not done.stderr
    assert not (tmp_path / "was_run").exists()
