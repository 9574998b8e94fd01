"""Signals, from Ctrl-C to SLURM's to requeue: finish the optimizer step, save, and stop on every rank."""

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import lightning as L
import torch

from granite_scu.config.errors import INTERRUPTED, TERMINATED, Stopped
from granite_scu.data.workers import end_loaders
from granite_scu.storage.run_folder import STOPPED, RunFolder
from granite_scu.training.trainer import LOST_AFTER

log = logging.getLogger(__name__)

REQUEUE = getattr(signal, "SIGUSR1", None)
"""Under SLURM: save, and put the job into the queue again (``#SBATCH --signal=SIGUSR1@90``)."""


ABOVE_ALL = 128
"""Added to that, so that it counts whatever other signal comes: they are compared by their numbers, on all ranks."""

LOST = [getattr(signal, name) for name in ("SIGHUP", "SIGXCPU", "SIGUSR2") if hasattr(signal, name)]
"""The terminal is gone, the processor time allowed is used up, and what schedulers send ahead of the end: each would
kill at once. Under nohup the first is ignored, and stays so."""


ONE_WISH = 1.0
"""Seconds in which a second SIGTERM is the first one's: a launcher and the group of processes may both send it."""


_ONCE_MORE = b"\nCtrl-C: the step under way is finished and saved; once more stops at once and saves nothing\n"


class GracefulStop(L.Callback):
    """Takes a signal between two optimizer steps, or between two batches of a validation.

    Ranks hear of it at different moments, and one alone may. So at each of these places they agree: the largest number
    of a signal that any has received, by one all-reduce of an integer between the hosts, which no device waits for.
    Once training is over everything is saved, and signals act at once, as they do before it.

    Args:
        folder: the run folder, which records what stopped the run.
        save: has a checkpoint of the newest step.
        resume_command: the command that continues the run.
    """

    def __init__(self, folder: RunFolder, save: Callable[[L.Trainer], None], resume_command: str) -> None:
        self.folder, self.save, self.resume_command = folder, save, resume_command
        self.received = 0
        self._terminated = math.inf  # when the first SIGTERM came
        self._step = 0
        self._hosts: Any = None
        self._previous: dict[int, Any] = {}

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Not at the start of training: a validation that a checkpoint owes is made up for there, by all ranks together.
        if trainer.world_size > 1:
            self._hosts = torch.distributed.new_group(backend="gloo", timeout=LOST_AFTER)
        if threading.current_thread() is not threading.main_thread():  # no other thread may say what signals do
            return
        handled = [signal.SIGINT, signal.SIGTERM, *([REQUEUE] if REQUEUE and "SLURM_JOB_ID" in os.environ else [])]
        handled += [number for number in LOST if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._note) for number in handled}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_) -> None:
        if trainer.global_step != self._step:  # not inside an accumulation window
            self._step = trainer.global_step
            self._stop_if_asked(trainer)

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._stop_if_asked(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stop_if_asked(trainer)
        self._let_go()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._let_go()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received:  # a second one does not wait, nor does one after another signal
            end_loaders()
            raise KeyboardInterrupt
        # Alone: schedulers send others ahead of the first SIGTERM, and that where a job is put into the queue again.
        if number == signal.SIGTERM and time.monotonic() - self._terminated > ONE_WISH:
            end_loaders()
            line = "stopped by a second SIGTERM; steps since the last checkpoint are lost; where there is one, "
            raise Stopped(f"{line}continue with: {self.resume_command}", TERMINATED, alone=True)
        if number == signal.SIGTERM:
            self._terminated = min(self._terminated, time.monotonic())
        if number == signal.SIGINT and sys.stderr.isatty():
            with suppress(OSError):  # by no stream of Python's: one may be in the middle of a write
                os.write(sys.stderr.fileno(), _ONCE_MORE)
        self.received = max(self.received, number + ABOVE_ALL * (number == REQUEUE))

    def _let_go(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        number = self._over_ranks(self.received) % ABOVE_ALL
        if not number:
            return
        self.save(trainer)
        line = ""
        if trainer.is_global_zero:
            name, step = signal.Signals(number).name, trainer.global_step
            self.folder.write_json(STOPPED, {"signal": name, "step": step, "checkpoint": f"checkpoint-{step}"})
            if number == REQUEUE:
                _requeue()
            by = "Ctrl-C" if number == signal.SIGINT else name
            line = f"stopped by {by} after step {step}, which is saved; continue with: {self.resume_command}"
        raise Stopped(line, INTERRUPTED if number == signal.SIGINT else TERMINATED)

    def _over_ranks(self, number: int) -> int:
        """The largest that any rank has."""
        if self._hosts is None:
            return number
        shared = torch.tensor(number)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return int(shared)


def _requeue() -> None:
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
        log.info("job %s is in the queue again", job)
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("job %s could not be put into the queue again (%s); submit it again", job, error)
