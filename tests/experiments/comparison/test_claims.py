"""Who may do a run, when several processes on one folder want to."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from granite_scu.experiments.comparison.claims import SILENT_AFTER, Claims
from granite_scu.experiments.comparison.evidence import Evidence, Spec
from granite_scu.experiments.comparison.protocol import NONE, Task

SPEC = Spec(Task("first", "stdlib-docs", 1024, 4), "none", "", 0, NONE.settings)
TAKE = (
    "import sys, time; from pathlib import Path; from granite_scu.experiments.comparison.claims import Claims;"
    "from granite_scu.experiments.comparison.evidence import Spec; "
    "from granite_scu.experiments.comparison.protocol import NONE, Task;"
    "claims = Claims(Path(sys.argv[1]));"
    "print(claims.take(Spec(Task('first', 'stdlib-docs', 1024, 4), 'none', '', 0, NONE.settings)), flush=True);"
    "time.sleep(600)"
)


@pytest.fixture
def claims(tmp_path):
    with Claims(tmp_path) as ours:
        yield ours


@pytest.fixture
def another(tmp_path):
    """Starts a process that claims the run; what it prints is whether it has it."""
    started = []

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", TAKE, str(tmp_path)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def left_by(folder: Path, host: str, process: int, seconds_ago: float) -> Path:
    """A claim that somebody left."""
    path = (folder / SPEC.file).with_name(f"{SPEC.key}.claim")
    path.parent.mkdir(parents=True)
    path.write_text(f"{host} {process}\n")
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_of_many_processes_one_has_the_run(another):
    others = [another() for _ in range(3)]
    assert sorted(other.stdout.readline() for other in others) == ["False\n", "False\n", "True\n"]


def test_a_claim_of_a_process_that_was_killed_is_taken_over(another, claims):
    other = another()
    assert other.stdout.readline() == "True\n"
    assert not claims.take(SPEC)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert claims.take(SPEC)


@pytest.mark.parametrize(("seconds_ago", "void"), [(SILENT_AFTER / 2, False), (SILENT_AFTER * 2, True)])
def test_another_machines_claim_holds_as_long_as_it_is_renewed(tmp_path, claims, seconds_ago, void):
    left_by(tmp_path, "another-machine", 1, seconds_ago)
    assert claims.take(SPEC) is void


def test_a_claim_without_its_contents_yet_holds(tmp_path, claims):
    left_by(tmp_path, "", 0, 0.0).write_text("")
    assert not claims.take(SPEC)


def test_a_claim_renewed_is_as_good_as_new(tmp_path, claims):
    assert claims.take(SPEC)
    [path] = files(tmp_path)
    assert path.read_text() == f"{socket.gethostname()} {os.getpid()}\n"
    os.utime(path, (0, 0))
    claims.renew()
    assert time.time() - path.stat().st_mtime < 60
    path.unlink()
    claims.renew()  # of one that is gone there is nothing to renew


def test_what_is_released_or_left_behind_can_be_taken(tmp_path):
    with Claims(tmp_path) as first, Claims(tmp_path) as second:
        assert first.take(SPEC) and not second.take(SPEC)
        first.release(SPEC)
        assert second.take(SPEC)
    assert files(tmp_path) == []


def test_a_claim_that_another_process_took_over_is_left_to_it(tmp_path, claims):
    assert claims.take(SPEC)
    [path] = files(tmp_path)
    path.write_text("another-machine 1\n")
    os.utime(path, (0, 0))
    claims.renew()
    claims.release(SPEC)
    assert path.read_text() == "another-machine 1\n" and path.stat().st_mtime == 0


def test_a_claim_is_no_record(tmp_path, claims):
    assert claims.take(SPEC)
    assert list(Evidence(tmp_path)) == []


def test_a_claim_is_not_committed():
    root = Path(__file__).parents[3]
    path = Path("docs/evidence/runs") / SPEC.file.with_name(f"{SPEC.key}.claim")
    ignored = subprocess.run(["git", "check-ignore", "-q", str(path)], cwd=root)
    if ignored.returncode == 128:
        pytest.skip("no git checkout")
    assert ignored.returncode == 0
