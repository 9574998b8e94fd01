"""The callbacks, loggers and Trainer of a run, put together."""

from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from granite_scu import hardware
from granite_scu.control.diagnostics.equilibrium import Equilibrium
from granite_scu.control.diagnostics.reachability import Reachability
from granite_scu.model import flops
from granite_scu.storage import checkpoint
from granite_scu.training import preflight as planning
from granite_scu.training.callbacks.audit import AdapterAudit
from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.checkpoints import Checkpoints
from granite_scu.training.callbacks.early_stopping import OwnPatience
from granite_scu.training.callbacks.equilibrium import EquilibriumStop
from granite_scu.training.callbacks.final_score import Finish
from granite_scu.training.callbacks.held_out_savings import Savings
from granite_scu.training.callbacks.progress import ProgressLine
from granite_scu.training.callbacks.reachability import ReachabilityMonitor
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.signals import GracefulStop
from granite_scu.training.callbacks.stopwatch import Stopwatch
from granite_scu.training.callbacks.throughput import Monitor
from granite_scu.training.callbacks.utilisation import UtilisationWatch
from granite_scu.training.controller import holds_setpoint
from granite_scu.training.module import GraniteModule
from granite_scu.training.resume import Resume, settings
from granite_scu.training.trainer import build_trainer

if TYPE_CHECKING:
    from granite_scu.training.recipe import Run


def assemble(run: "Run", module: GraniteModule, resume: Resume | None) -> tuple[Finish, L.Trainer]:
    """The callback that scores and saves at the end, and the Trainer that calls it and all the others."""
    request, asked = run.request, run.request.run
    stopwatch = Stopwatch()
    scu = ShannonControl(run.controller, request.control.every, stopwatch, run.folder.append_history, _monitor(run))
    best = BestAdapter(run.folder.path / "best")
    finish = run.make_finish(scu, best, stopwatch)
    finish.reachability = watch = _watch(run, scu, module)
    callbacks = [stopwatch, AdapterAudit(), scu, *([watch] if watch else []), best]
    if request.control.controller == "cascade":
        callbacks.append(Savings(scu))
    if asked.stop_at_equilibrium:
        callbacks.append(EquilibriumStop(scu, Equilibrium(run.controller.setpoint, asked.stop_at_equilibrium)))
    if asked.early_stopping:
        callbacks.append(OwnPatience("val_bpt", patience=asked.early_stopping))
    if asked.expected_mfu:
        callbacks.append(UtilisationWatch(scu, asked.expected_mfu, _speed_settings(run)))
    checkpoints = Checkpoints(run.folder, asked.save_steps, asked.eval_steps, asked.keep, stopwatch, settings(run))
    callbacks += [
        ProgressLine(scu, request.trainer["log_every_n_steps"], run.console),
        checkpoints,
        GracefulStop(checkpoints),
        finish,  # last: it scores what the others have left
    ]
    io = checkpoint.AdapterCheckpointIO()
    io.module = module
    trainer = build_trainer(
        request.trainer,
        run.machine,
        steps=run.plan.steps,
        eval_steps=asked.eval_steps,
        callbacks=callbacks,
        loggers=_loggers(run, resume),
        plugin=io,
        spent=run.probe_seconds,
    )
    return finish, trainer


def _loggers(run: "Run", resume: Resume | None) -> list[Logger]:
    logs = run.folder.path / "logs"
    # Each leg of the run has a file of its own: the CSV logger would delete the one it finds.
    leg = f"from-{resume.path.name}" if resume else ""
    # Written at once, so that a crash loses no validation.
    csv = CSVLogger(logs, name="csv", version=leg, flush_logs_every_n_steps=1)
    return [TensorBoardLogger(logs, name="tensorboard", version=""), csv]


def _monitor(run: "Run") -> Monitor:
    data = run.request.data
    shapes = run.start and run.start.shapes
    size = flops.measure(run.request.base.name, run.request.lora, data.block_size, shapes)
    return Monitor(
        blocks_per_step=run.plan.tokens_per_step // data.block_size,
        flops_per_step=run.plan.tokens_per_step * size.flops_per_token,
        peak=hardware.peak_flops(run.machine.device, run.machine.precision, run.machine.tf32),
        devices=run.machine.world_size,
        on_gpu=run.machine.accelerator == "cuda",
    )


def _speed_settings(run: "Run") -> dict[str, Any]:
    """What low utilisation may come from."""
    base, data = run.request.base, run.request.data
    return {
        "batch_size": data.batch_size,
        "num_workers": data.num_workers,
        "compile": base.compile,
        "gradient_checkpointing": base.gradient_checkpointing,
        "precision": run.machine.precision,
    }


def _watch(run: "Run", scu: ShannonControl, module: GraniteModule) -> ReachabilityMonitor | None:
    if not holds_setpoint(run):
        return None
    config = run.request.control
    growth = planning.update_growth(run, [tuple(u.b.shape) for u in module.updates.values()])
    moved = planning.cumulated_rates(run.request.optimizer, run.plan.steps)
    law = Reachability(run.controller.setpoint, growth)
    bounds = (config.lambda_min, config.lambda_max)
    return ReachabilityMonitor(scu, law, bounds, moved, in_gradient=config.actuator == "loss")
