"""A signal for the whole group of processes finds no moment at which a loader process dies of it; where one is lost in
another way, the batches are the same without it."""

import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from granite_scu.data import workers
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


@pytest.fixture
def quickly(monkeypatch):
    """Loaders that look at their processes after a moment; what they do without one, they say once."""
    monkeypatch.setattr(workers, "LOOK", 0.4)

    def loader(dataset, patience=0.8, **settings):
        begin = {"worker_init_fn": leave_signals_to_the_run, "persistent_workers": True}
        return SteadyLoader(dataset, num_workers=2, patience=patience, **begin, **settings)

    return loader


def given_up(caplog) -> list[str]:
    return [message for message in caplog.messages if "--num-workers 0" in message and "--shm-size" in message]


@pytest.mark.parametrize(
    ("number", "patience", "words"),
    [(signal.SIGKILL, 60, "ended by another"), (signal.SIGSTOP, 0.8, "done nothing for 1 seconds")],
)
def test_a_process_that_is_killed_or_hangs_is_done_without(quickly, caplog, number, patience, words):
    before = set(psutil.Process().children())
    loader = quickly(range(40), patience)
    batches = iter(loader)
    first = [int(next(batches)) for _ in range(3)]
    children = set(psutil.Process().children()) - before
    os.kill(min(child.pid for child in children), number)
    assert first + [int(batch) for batch in batches] == list(range(40))
    (message,) = given_up(caplog)
    assert words in message
    assert [int(batch) for batch in loader] == list(range(40)) and len(given_up(caplog)) == 1
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_there_may_be_no_room_for_batches_or_for_processes(quickly, caplog):
    assert [int(batch) for batch in quickly(range(9), batch_bytes=1 << 60)] == list(range(9))
    assert "/dev/shm" in given_up(caplog)[0]
    caplog.clear()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, before[1]))
    try:
        batches = iter(quickly(range(9)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [int(batch) for batch in batches] == list(range(9))
    assert "cannot be started (Too many open files)" in given_up(caplog)[0]


class Slow:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        until = time.process_time() + 0.9
        while time.process_time() < until:
            pass
        return index


def test_one_that_computes_is_waited_for(quickly, caplog):
    assert [int(batch) for batch in quickly(Slow())] == [0, 1]
    assert not given_up(caplog)
