"""Workers that die, as one does that the system has no memory for, and one whose parent does."""

import subprocess
import sys

import psutil
import pytest

from granite_scu.experiments.comparison.evidence import Spec
from granite_scu.experiments.comparison.pool import Pool
from granite_scu.experiments.comparison.protocol import NONE, Task

SPEC = Spec(Task("first", "stdlib-docs", 1024, 4), "none", "", 0, NONE.settings)


@pytest.fixture
def pool(tmp_path):
    with Pool(1, tmp_path) as workers:
        yield workers


def test_a_worker_that_dies_before_it_reads_its_run_is_that_runs_error(pool):
    pool.start(SPEC)
    pool.workers[0].process.kill()  # it is still importing torch; what it was sent lies unread
    [finished] = pool.finished(timeout=30)
    assert finished.spec is SPEC
    assert finished.error == "its process ended with code -9; out of memory?"
    assert not pool.busy and pool.has_room


def test_a_worker_that_dies_while_it_is_sent_its_run_is_that_runs_error(pool):
    pool.start(SPEC)
    [worker] = pool.workers
    worker.process.kill()
    worker.process.join()
    worker.start(SPEC)  # the pipe is broken
    [finished] = pool.finished(timeout=30)
    assert "ended with code -9" in finished.error


def test_a_worker_that_died_idle_is_given_nothing(pool):
    pool.start(SPEC)
    [dead] = pool.workers
    dead.process.kill()
    dead.process.join()
    dead.spec = None  # as after a run
    pool.start(SPEC)
    assert pool.workers[-1] is not dead and pool.workers[-1].process.is_alive()
    assert pool.busy == [SPEC] and dead.spec is None


INTERRUPTED = """
import multiprocessing
from pathlib import Path
from granite_scu.experiments.comparison import pool, runs

def interrupted(*_):
    raise KeyboardInterrupt

runs.carry_out, pool._leave_with_parent = interrupted, int
ours, theirs = multiprocessing.Pipe()
ours.send("a run")
pool._work(theirs, Path())
"""
"""A worker whose run is stopped while it probes: Lightning makes an interrupt of what ``_leave`` raises there."""


def test_a_worker_whose_run_is_interrupted_leaves_without_a_word():
    left = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (left.returncode, left.stderr) == (143, "")


def test_a_worker_leaves_its_run_when_its_parent_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from granite_scu.experiments.comparison.evidence import Spec;"
        "from granite_scu.experiments.comparison.pool import Pool; "
        "from granite_scu.experiments.comparison.protocol import NONE, Task;"
        "pool = Pool(1, Path(sys.argv[1]));"
        "pool.start(Spec(Task('first', 'stdlib-docs', 1024, 4), 'none', '', 0, NONE.settings));"
        "print(pool.workers[0].process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    worker.wait(timeout=120)  # it might be just importing
    assert not list(tmp_path.rglob("*"))  # else it would have done the run, which it was sent already
