"""A signal for the whole group of processes finds no moment at which a loader process dies of it."""

import subprocess
import sys
import time

import psutil
import pytest

from granite_scu.data.workers import SteadyLoader, leave_signals_to_the_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals as Linux has them")


def begin_late(worker):
    time.sleep(0.5)
    leave_signals_to_the_run(worker)


@pytest.mark.parametrize("begin", [begin_late, leave_signals_to_the_run])
@pytest.mark.parametrize("name", ["TERM", "INT", "USR1"])
def test_a_signal_from_elsewhere_ends_no_loader_process(begin, name):
    before = set(psutil.Process().children())
    batches = iter(SteadyLoader(range(8), num_workers=1, worker_init_fn=begin))
    (child,) = set(psutil.Process().children()) - before
    subprocess.run(["sh", "-c", f"kill -{name} {child.pid}"], check=True)  # built in: not everybody has the program
    assert [int(batch) for batch in batches] == list(range(8))


def test_the_runs_own_sigterm_ends_it():
    before = set(psutil.Process().children())
    batches = iter(
        SteadyLoader(range(8), num_workers=1, worker_init_fn=leave_signals_to_the_run, persistent_workers=True)
    )
    next(batches)
    (child,) = set(psutil.Process().children()) - before
    child.terminate()
    assert child.wait(timeout=10) == 0
