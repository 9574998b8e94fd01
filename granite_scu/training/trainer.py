"""Lightning's Trainer as a run wants it: what the user may set, and what follows from other settings."""

import inspect
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from granite_scu.config.errors import RunFailed, Stopped, UserError
from granite_scu.config.settings import MOST, SET_BY_THE_RUN, TRAINER_DEFAULTS
from granite_scu.data.workers import errors_in_one_line
from granite_scu.hardware.machine import Machine
from granite_scu.model.sharding import ShardedBase

LOST_AFTER = timedelta(minutes=10)
"""What a process waits for the others before it takes them for lost. None does anything alone for that long."""


def check_trainer(settings: dict[str, Any]) -> None:
    """Refuse settings of Lightning's Trainer that it would refuse late, or that the run would pass over."""
    usual = {name: parameter.default for name, parameter in inspect.signature(L.Trainer).parameters.items()}
    for name, instead in SET_BY_THE_RUN.items():
        if settings[name] != (usual | TRAINER_DEFAULTS)[name]:
            raise UserError(f"--trainer.{name} {settings[name]}: follows from other settings; use {instead}")
    counts = {
        "accumulate_grad_batches": "--gradient-accumulation-steps",
        "limit_val_batches": "--eval-iters",
        "log_every_n_steps": "--logging-steps",
    }
    for name, flag in counts.items():
        if not (type(settings[name]) is int and 1 <= settings[name] <= MOST):
            raise UserError(f"{flag} {settings[name]}: must be a whole number, at least 1 and at most {MOST:,}")
    if not 1 <= settings["max_steps"] <= MOST and settings["max_steps"] != -1:
        raise UserError(f"--max-steps {settings['max_steps']}: must be at least 1, and at most {MOST:,}")
    try:
        Timer(settings["max_time"])
    except MisconfigurationException as error:
        raise UserError(f"--max-time {settings['max_time']}: must have the form DD:HH:MM:SS, as 00:01:30:00") from error


class TimeLimit(Timer):
    """Stops after the time, between two optimizer steps: a window of micro-batches is not cut in two.

    Args:
        max_time: as ``--max-time``; None does not limit.
    """

    def __init__(self, max_time: Any) -> None:
        super().__init__(max_time)

    @property
    def stop_reason(self) -> str | None:
        """Why this ended the run; None where it did not."""
        left = self.time_remaining()
        return "max_time" if left is not None and left <= 0 else None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if (trainer.fit_loop.total_batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, *args, **kwargs)


def build_trainer(
    settings: dict[str, Any],
    machine: Machine,
    *,
    steps: int,
    eval_steps: int | None,
    callbacks: list,
    loggers: list,
    plugin: Any,
) -> L.Trainer:
    """The Trainer.

    Args:
        settings: the user's arguments, checked by ``check_trainer``; of these ``max_time`` is a ``TimeLimit`` among
            the callbacks.
        machine: devices, processes and precision.
        steps: optimizer steps of the run.
        eval_steps: optimizer steps between validations; None never validates.
        callbacks: ours, in order; the user's follow.
        loggers: ours; the user's follow.
        plugin: writes checkpoints.

    Raises:
        UserError: Lightning refuses the combination.
    """
    settings = settings | {"max_time": None, "benchmark": _cudnn_benchmark(settings, machine.accelerator)}
    # broadcast_buffers: the module's sums differ between ranks until they are reduced, and must not be overwritten.
    kind = ShardedBase if machine.sharded else DDPStrategy
    several = kind(broadcast_buffers=False, timeout=LOST_AFTER) if machine.world_size > 1 else "auto"
    settings |= {
        "accelerator": machine.accelerator,
        "devices": machine.devices,
        "num_nodes": machine.nodes,
        "strategy": several,
        "precision": machine.precision,
        "max_steps": steps,
        "max_epochs": -1,  # the loader has no end; the steps have
        "val_check_interval": eval_steps * settings["accumulate_grad_batches"] if eval_steps else None,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,  # Lightning's own; callbacks.checkpoints does it
        "use_distributed_sampler": False,  # data.sampling shards
        "gradient_clip_val": None,  # the module clips, after the penalty
        "callbacks": [*callbacks, *_as_list(settings.get("callbacks"))],
        "logger": [*loggers, *_as_list(settings.get("logger"))],
        "plugins": [plugin, *_as_list(settings.get("plugins"))],
    }
    if eval_steps is None:
        settings["limit_val_batches"] = 0
    try:
        trainer = L.Trainer(**settings)
    except (MisconfigurationException, ValueError) as error:
        raise UserError(f"--trainer: {error}") from error
    _leave_signals_alone(trainer)
    return trainer


def _cudnn_benchmark(settings: dict[str, Any], accelerator: str) -> bool:
    """Whether cuDNN searches for the fastest convolution, which may be another one in the next run."""
    asked = settings.get("benchmark")
    return accelerator == "cuda" and not settings.get("deterministic") if asked is None else asked


def _leave_signals_alone(trainer: L.Trainer) -> None:
    """Have Lightning ignore signals; ``callbacks.signals`` does.

    Lightning's handler of SIGTERM broadcasts from inside the signal, which deadlocks where the ranks are not all in
    it (Lightning-AI/pytorch-lightning#20806); before every micro-batch it has the device wait for a broadcast; its
    handler for SLURM saves in the middle of a step. None of it can be switched off.
    """
    connector, epoch_loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    for owner, name in (
        (connector, "register_signal_handlers"),
        (connector, "teardown"),
        (epoch_loop, "_broadcast_sigterm_tensor"),
    ):
        getattr(owner, name)  # gone in another version of Lightning: fail here, and not by a deadlock
        setattr(owner, name, lambda: None)


def fit(trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule, checkpoint: Path | None) -> None:
    """Train to the end, or to a signal.

    Raises:
        Stopped: a signal ended it, between two steps, on every rank.
        KeyboardInterrupt: a Ctrl-C that did not wait.
        RunFailed: another process was lost.
    """
    try:
        with errors_in_one_line():
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    except Stopped as stop:
        if not stop.alone:
            part(trainer)
        raise
    except SystemExit as stop:  # Lightning's answer to Ctrl-C
        raise KeyboardInterrupt from stop
    except RuntimeError as error:
        if cause := _lost(error):
            raise RunFailed(f"{cause}; --resume-from-checkpoint last continues from the last checkpoint") from error
        raise


def conclude(trainer: L.Trainer, module: L.LightningModule) -> None:
    """What comes after the last step. Lightning passes over it where steps or time leave no step to take."""
    trainer.strategy.model_to_device()
    for callback in trainer.callbacks:
        callback.on_train_start(trainer, module)
    for callback in trainer.callbacks:
        callback.on_train_end(trainer, module)


def _lost(error: RuntimeError) -> str | None:
    """What ended without a word of its own, as the libraries' errors tell it."""
    words = str(error)
    if isinstance(error, torch.distributed.DistError) or "closed by peer" in words or "gloo" in words:
        return "another process of this run was lost"
    return None


def part(trainer: L.Trainer) -> None:
    """End the bond between processes, all at once and when the last file is written.

    One that ended early, with gloo's threads still running, could be aborted by them; torchrun then stops the others.
    """
    children(trainer).clear()
    if torch.distributed.is_initialized():
        trainer.strategy.barrier()
        torch.distributed.destroy_process_group()


def kill_children(trainer: L.Trainer) -> None:
    """End the processes that Lightning started: all that was to be saved, this process has saved."""
    for child in children(trainer):
        child.kill()
    children(trainer).clear()


def children(trainer: L.Trainer) -> list[subprocess.Popen]:
    """The processes that Lightning started itself, as it does where no launcher did; in these, none.

    Lightning watches this very list, and kills the process that has it within five seconds of the end of one in it
    whose exit code is not 0. So it is emptied before they end that way on purpose, as after a signal.
    """
    return getattr(trainer.strategy.launcher, "procs", [])


def _as_list(value: Any) -> list:
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
