"""What a Ctrl-C says. What it does: tests/integration/test_killed.py."""

import math
import os
import pty
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from granite_scu.config.errors import Stopped
from granite_scu.storage.run_folder import STOPPED, RunFolder
from granite_scu.training.callbacks import signals
from granite_scu.training.callbacks.signals import GracefulStop


def test_on_a_terminal_the_first_interrupt_says_what_a_second_one_does(tmp_path, monkeypatch):
    terminal, ours = pty.openpty()
    stop = GracefulStop(RunFolder(tmp_path), save=lambda trainer: None, resume_command="")
    with open(ours, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        stop.on_fit_start(SimpleNamespace(world_size=1), module=None)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            assert b"once more stops at once and saves nothing" in os.read(terminal, 1000)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            stop.on_exception(None, None, KeyboardInterrupt())
    os.close(terminal)


def test_a_job_of_slurms_without_a_number_of_tasks_saves_before_its_end(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    stop = GracefulStop(RunFolder(tmp_path), save=lambda trainer: None, resume_command="")
    stop.on_fit_start(SimpleNamespace(world_size=1), module=None)
    try:
        assert signal.getsignal(signals.REQUEUE) == stop._note
    finally:
        stop.on_exception(None, None, KeyboardInterrupt())


def test_a_run_in_a_thread_leaves_signals_to_the_program_that_it_is_in(tmp_path):
    stop = GracefulStop(RunFolder(tmp_path), save=lambda trainer: None, resume_command="")
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(stop.on_fit_start, SimpleNamespace(world_size=1), None).result()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_sigterm_that_follows_another_signal_is_no_second_one(tmp_path, monkeypatch):
    """SLURM sends it where the job is put into the queue again; by then the run has said where it stopped."""
    monkeypatch.setattr(signals, "ONE_WISH", -1)
    stop = GracefulStop(RunFolder(tmp_path), save=lambda trainer: None, resume_command="")
    monkeypatch.setattr(signals, "_requeue", lambda: stop._note(signal.SIGTERM, None))
    stop._note(signals.REQUEUE, None)
    stop._note(signal.SIGTERM, None)  # within the same step, and of a larger number
    monkeypatch.setattr(stop, "_terminated", math.inf)
    with pytest.raises(Stopped, match="stopped by SIGUSR1 after step 3"):
        stop._stop_if_asked(SimpleNamespace(is_global_zero=True, global_step=3))
    assert (tmp_path / STOPPED).is_file()
    with pytest.raises(Stopped, match="by a second SIGTERM"):
        stop._note(signal.SIGTERM, None)
