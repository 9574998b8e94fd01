"""Lightning's Trainer as a run wants it: what the user may set, and what follows from other settings."""

import subprocess
from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import jsonargparse
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from granite_scu.config import launcher
from granite_scu.config.errors import INTERRUPTED, RunFailed, Stopped, UserError
from granite_scu.config.settings import TrainerConfig
from granite_scu.data.workers import errors_in_one_line
from granite_scu.hardware.machine import Machine
from granite_scu.model.compilation import decoder_layers

LOST_AFTER = timedelta(minutes=10)
"""What a process waits for the others before it takes them for lost. None does anything alone for that long, but that
the first may let the base model write: ``general_text.WRITTEN_WITHIN``."""

OVERWRITES = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in signature(DDP).parameters)
"""What DDP calls, since PyTorch 2.13 and before, whether it overwrites buffers: the module's sums differ between ranks
until they are reduced."""

ENVIRONMENTS = {"torchrun": TorchElasticEnvironment, "slurm": SLURMEnvironment, None: LightningEnvironment}
"""Where Lightning learns its place among the processes. It would take a single task of SLURM's for the whole world."""

GIVEN = {"logger": Logger, "callbacks": L.Callback}
"""What the user may give the Trainer beside ours, and of which kind each of them is."""


def given_objects(settings: TrainerConfig) -> dict[str, list]:
    """The loggers and callbacks that the user gives, made where they are described by ``class_path``.

    Raises:
        UserError: a description that is none of such a thing.
    """
    return {name: [_made(name, each) for each in _as_list(getattr(settings, name))] for name in GIVEN}


def _made(name: str, described: Any) -> Any:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=GIVEN[name])
    try:
        return parser.instantiate_classes(parser.parse_object({name: described}))[name]
    # The last two are of the class that is made, with arguments of the right kinds.
    except (jsonargparse.ArgumentError, TypeError, ValueError, MisconfigurationException) as error:
        cause = " ".join(str(error).split()).removeprefix(f'Parser key "{name}": ')[:400]
        raise UserError(f"--trainer.{name}: {cause}") from error


class TimeLimit(Timer):
    """Stops after the time, between two optimizer steps: a window of micro-batches is not cut in two."""

    @property
    def stop_reason(self) -> str | None:
        """Why this ended the run; None where it did not."""
        return "max_time" if self.time_remaining() <= 0 else None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if (trainer.fit_loop.total_batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, *args, **kwargs)


class OwnPatience(EarlyStopping):
    """Lightning's, which would have a continued run keep the patience that it began with.

    Args:
        patience: validations without a better one that end the run.
        counts: whether a validation counts, as none does while drift is beyond its budget: there the loop moves the
            adapter, and bits may rise for it. Every rank calls it. None counts all.
    """

    def __init__(self, patience: int, counts: Callable[[], bool] | None = None) -> None:
        super().__init__("val_bpt", patience=patience)
        self.counts = counts

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        if self.counts and current.isfinite() and not self.counts():
            return False, None
        return super()._evaluate_stopping_criteria(current)

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    def on_train_batch_start(self, *_) -> None:
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED  # a run that makes another step continues

    @property
    def stop_reason(self) -> str | None:
        """Why this ended the run; None where it did not."""
        return None if self.stopping_reason is EarlyStoppingReason.NOT_STOPPED else "early_stopping"


def build_trainer(
    asked: TrainerConfig,
    machine: Machine,
    *,
    folder: Path,
    steps: int,
    eval_steps: int | None,
    callbacks: list,
    loggers: list,
    plugin: Any,
) -> L.Trainer:
    """The Trainer.

    Args:
        asked: of it; its ``max_time`` is a ``TimeLimit`` among the callbacks.
        machine: devices, processes and precision.
        folder: of the run.
        steps: optimizer steps of the run.
        eval_steps: optimizer steps between validations; None never validates.
        callbacks: ours, in order; the user's follow.
        loggers: ours; the user's follow.
        plugin: writes checkpoints.

    Raises:
        UserError: Lightning refuses the combination.
    """
    given = given_objects(asked)
    kind = ShardedBase if machine.sharded else DDPStrategy
    several = kind(**{OVERWRITES: False}, timeout=LOST_AFTER) if machine.world_size > 1 else "auto"
    settings = vars(asked) | {
        "max_time": None,
        "default_root_dir": folder,  # under SLURM Lightning continues from a hpc_ckpt_1.ckpt that it finds there
        # cuDNN's search for the fastest convolution, which may be another one in the next run.
        "benchmark": machine.accelerator == "cuda" and not asked.deterministic,
        "accelerator": machine.accelerator,
        "devices": machine.devices,
        "num_nodes": machine.nodes,
        "strategy": several,
        "precision": machine.precision,
        "max_steps": steps,
        "max_epochs": -1,  # the loader has no end; the steps have
        "val_check_interval": eval_steps * asked.accumulate_grad_batches if eval_steps else None,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,  # Lightning's own; callbacks.checkpoints does it
        "use_distributed_sampler": False,  # data.sampling shards
        "gradient_clip_val": None,  # the module clips, after the penalty
        "callbacks": [*callbacks, *given["callbacks"]],
        "logger": [*loggers, *given["logger"]],
        "plugins": [plugin, ENVIRONMENTS[launcher.launcher()]()],
    }
    if eval_steps is None:
        settings["limit_val_batches"] = 0
    try:
        trainer = L.Trainer(**settings)
    except (MisconfigurationException, ValueError) as error:
        raise UserError(f"--trainer: {error}") from error
    _leave_signals_alone(trainer)
    return trainer


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
        Stopped: a signal ended it, between two steps, on every rank; or a Ctrl-C did before the first one.
        KeyboardInterrupt: a Ctrl-C that did not wait.
        RunFailed: another process was lost.
    """
    try:
        with errors_in_one_line():
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    except Stopped as stop:
        if not stop.alone:
            destroy_process_group(trainer)
        raise
    except SystemExit as stop:  # Lightning's answer to Ctrl-C
        if checkpoint is None and not trainer.global_step:
            line = "stopped by Ctrl-C before the first step: nothing was trained yet; "
            raise Stopped(f"{line}the same command with --overwrite starts again", INTERRUPTED, alone=True) from stop
        raise KeyboardInterrupt from stop
    except RuntimeError as error:
        if cause := _lost(error):
            raise RunFailed(f"{cause}; --resume-from-checkpoint last continues from the last checkpoint") from error
        raise


def run_end_hooks(trainer: L.Trainer, module: L.LightningModule) -> None:
    """What comes after the last step. Lightning passes over it where steps or time leave no step to take."""
    trainer.strategy.model_to_device()
    for callback in trainer.callbacks:
        callback.on_train_start(trainer, module)
    for callback in trainer.callbacks:
        callback.on_train_end(trainer, module)


def _lost(error: RuntimeError) -> str | None:
    """Why processes lost one another, as the libraries' errors tell it; None of other errors."""
    message = str(error)
    if "connectFullMesh" in message:  # gloo's, which tells the others the address that the machine's name stands for
        return (
            "the processes do not reach one another; on several machines set GLOO_SOCKET_IFNAME to the network "
            "interface between them"
        )
    if isinstance(error, torch.distributed.DistError) or "closed by peer" in message or "gloo" in message:
        return "another process of this run was lost"
    return None


def destroy_process_group(trainer: L.Trainer) -> None:
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


class ShardedBase(DDPStrategy):
    """DDP of adapters that are whole everywhere, over frozen layers of which each process holds a share.

    A layer's weights are gathered for its forward and again for its backward pass, and let go of after each; they
    have no gradient, so nothing is scattered. Adapters are about a hundredth of the model: as each process has all of
    them, norms, penalty, clipping, optimizer and checkpoints are what they are without sharding. On several nodes the
    shares are those of a node (hybrid sharding), and gathering stays inside it.

    Gathering is done by all processes together, so each must take as many forward passes as the others.
    """

    def model_to_device(self) -> None:
        module = self.lightning_module
        assert module is not None
        shard(module.language_model.base_model, self._mesh())  # before it moves: no device has to hold the whole
        elsewhere = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
        DDP._set_params_and_buffers_to_ignore_for_model(module, elsewhere)
        super().model_to_device()

    def _mesh(self) -> DeviceMesh:
        shape = (self.num_processes,) if self.num_nodes == 1 else (self.num_nodes, self.num_processes)
        return init_device_mesh(self.root_device.type, shape)


def shard(decoder: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Have every layer's frozen weights shared out over the last dimension of ``mesh``, once.

    Args:
        decoder: its weights outside of layers stay whole, as the loss reads the embedding outside of any.
        mesh: the processes, on one node or (nodes, processes of each).

    Raises:
        UserError: its layers cannot be told.
    """
    if isinstance(decoder, FSDPModule):
        return
    layers = decoder_layers(decoder)
    if layers is None:
        raise UserError(f"--fsdp: the layers of a {decoder.config.model_type} model cannot be told; leave it out")
    for layer in layers:
        trained = {parameter for parameter in layer.parameters() if parameter.requires_grad}
        fully_shard(layer, mesh=mesh, ignored_params=trained, reshard_after_forward=True)
    # A root without weights of its own: under it a layer's weights are fetched while the one before it computes.
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()))
