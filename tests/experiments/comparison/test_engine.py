"""Several commands on one folder of evidence: their engines and claims are real, their runs train nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNS = 17
"""Of the quick protocol, the base model's among them; PI at the chosen setpoint is one of those it is chosen from."""


@pytest.fixture
def start(tmp_path):
    """Starts a command, in a process group of its own."""
    started = []

    def command() -> subprocess.Popen:
        script = Path(__file__).with_name("untrained.py")
        process = subprocess.Popen(
            [sys.executable, script, tmp_path],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores Ctrl-C
        )
        started.append(process)
        return process

    yield command
    for process in started:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def begun(folder: Path, least: int = 0) -> list[str]:
    """The keys of the runs that were begun, once there are so many."""
    end = time.time() + 120
    while time.time() < end:
        keys = (folder / "log").read_text().split() if (folder / "log").exists() else []
        if len(keys) >= least:
            return keys
        time.sleep(0.05)
    pytest.fail(f"of {least} runs {len(keys)} were begun")


def left(folder: Path, pattern: str) -> list[Path]:
    return list((folder / "runs").rglob(pattern))


@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_two_commands_do_no_run_twice_and_end_when_all_is_done(tmp_path, start):
    (tmp_path / "hold").touch()
    both = [start(), start()]
    begun(tmp_path, least=2)  # one each, side by side
    assert len(left(tmp_path, "*.claim")) == 2
    (tmp_path / "hold").unlink()
    done = [int(process.communicate(timeout=120)[0]) for process in both]
    assert min(done) >= 1 and sum(done) == RUNS
    keys = begun(tmp_path)
    assert len(keys) == len(set(keys)) == len(left(tmp_path, "*.json")) == RUNS
    assert not left(tmp_path, "*.claim")


@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_the_run_of_a_command_that_was_killed_is_done_by_the_next(tmp_path, start):
    (tmp_path / "hold").touch()
    first = start()
    [key] = begun(tmp_path, least=1)
    kill(first)
    assert [path.stem for path in left(tmp_path, "*.claim")] == [key] and not left(tmp_path, "*.json")
    (tmp_path / "hold").unlink()
    done, _ = start().communicate(timeout=120)
    assert int(done) == RUNS
    assert begun(tmp_path).count(key) == 2 and len(set(begun(tmp_path))) == RUNS
    assert not left(tmp_path, "*.claim")


@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_a_command_that_is_interrupted_leaves_no_claim(tmp_path, start):
    (tmp_path / "hold").touch()
    process = start()
    begun(tmp_path, least=1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert not left(tmp_path, "*.claim")
