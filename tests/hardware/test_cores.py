"""How many cores are ours: by affinity, by a container's quota, and beside others."""

import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.hardware import detection as cores
from granite_scu.hardware.detection import CompetingLoad, _Reading, allowed, threads_left


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 64),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 64),
        ("nonsense", 64),
        (None, 64),
    ],
)
def test_a_containers_quota_counts_beside_the_affinity(tmp_path, monkeypatch, quota, expected):
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    monkeypatch.setattr(cores, "QUOTA", file)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert allowed() == expected


@pytest.mark.parametrize(
    ("others", "count", "threads"),
    [(0.0, 2, 2), (0.3, 2, 2), (0.5, 2, 1), (1.0, 2, 1), (2.0, 2, 1), (7.0, 2, 1), (1.0, 16, 15), (0.2, 1, 1)],
)
def test_a_thread_is_given_up_for_each_core_that_others_keep_busy(others, count, threads):
    assert threads_left(others, count) == threads


@given(st.floats(0, 300), st.floats(0, 300), st.integers(1, 256))
def test_more_load_never_means_more_threads(one, other, count):
    less, more = sorted([one, other])
    assert 1 <= threads_left(more, count) <= threads_left(less, count) <= count


def test_what_this_process_and_its_children_use_is_not_others(monkeypatch):
    load = CompetingLoad()
    readings = iter([_Reading(10.0, 100.0, 40.0), _Reading(14.0, 107.0, 44.0), _Reading(16.0, 108.0, 47.0)])
    monkeypatch.setattr(load, "_read", lambda: next(readings))
    load._last = next(readings)
    assert load.read() == pytest.approx((7 - 4) / 4)
    assert load.read() == 0  # clocks that tick apart may say less than nothing


def test_a_process_that_spins_is_seen():
    # Left behind by a shell that has ended, it is nobody's child of ours.
    line = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    number = int(subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout)
    try:
        load = CompetingLoad()
        time.sleep(1)
        assert load.read() > 0.3
    finally:
        os.kill(number, signal.SIGKILL)
