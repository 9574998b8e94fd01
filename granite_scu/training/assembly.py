"""The Trainer of a run, with its callbacks in their order: what ends the run, measures, keeps and shows it."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from granite_scu import control
from granite_scu.control.diagnostics.equilibrium import Equilibrium
from granite_scu.control.diagnostics.reachability import Reachability
from granite_scu.data.blocks.packing import padding_of
from granite_scu.hardware import peaks
from granite_scu.model.drift import anchor_tokens, steering_tokens
from granite_scu.storage.checkpoint import AdapterCheckpointIO
from granite_scu.storage.run_folder import BEST_ADAPTER
from granite_scu.training import general_data
from granite_scu.training.callbacks.audit import AdapterAudit
from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.checkpoints import Checkpoints
from granite_scu.training.callbacks.drift import DriftMeter
from granite_scu.training.callbacks.equilibrium import EquilibriumStop
from granite_scu.training.callbacks.final_score import FinalScore
from granite_scu.training.callbacks.progress import ProgressLine
from granite_scu.training.callbacks.reachability import ReachabilityMonitor
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.signals import GracefulStop
from granite_scu.training.callbacks.threads import FreeCores, may_change
from granite_scu.training.callbacks.throughput import Monitor, Stopwatch
from granite_scu.training.callbacks.utilisation import UtilisationWatch
from granite_scu.training.learning_rate import PlannedRates
from granite_scu.training.loggers import RunLogger
from granite_scu.training.module import GraniteModule
from granite_scu.training.prepared_run import PreparedRun, validations
from granite_scu.training.trainer import OwnPatience, TimeLimit, build_trainer

log = logging.getLogger(__name__)


def assemble(
    run: PreparedRun,
    module: GraniteModule,
    final_score: Callable[..., FinalScore],
    questions: Callable[..., L.Callback] | None,
    resume_command: str,
) -> tuple[L.Trainer, BestAdapter, FinalScore, list[RunLogger]]:
    """The Trainer, and those of its callbacks and loggers that the recipe speaks to.

    Each callback comes after those whose work it needs. What may end the run comes before what measures, so
    that a tick after the time is over decides nothing. What is measured and shown comes before the checkpoints, which
    have the state of all, and the results come last.
    """
    drift = _drift(run)
    stoppers = _stoppers(run, drift)
    settled = [each for each in stoppers if isinstance(each, EquilibriumStop)]

    # What measures the run and steers it by that.
    stopwatch, reachability, line = Stopwatch(), _reachability(run), _progress_line(run)
    told = [each for each in (reachability, drift, _utilisation(run), *settled, line) if each]
    every, monitor = run.request.control.every, _monitor(run)
    record, plant = run.folder.append_history, drift and drift.plant
    steering = ShannonControl(run.controller, every, stopwatch, record, monitor, told, plant)
    sensor = steering.loop.sensor if isinstance(steering.loop.sensor, L.Callback) else None
    free = may_change(run.machine.accelerator, bool(run.request.trainer.deterministic))
    of_time = [FreeCores() if free else None, drift, sensor, stopwatch]  # which stands still for what a sensor reads
    measuring = [*of_time, AdapterAudit(), steering, reachability, line]

    # What keeps it: the best adapter so far, checkpoints, and one more of them where a signal stops it.
    best = BestAdapter(run.folder.path / BEST_ADAPTER, drift and drift.budget, drift and drift.steered)
    intervals, keep = (run.intervals.checkpoint, run.validation_interval), run.request.run.keep
    checkpoints = Checkpoints(run.folder, *intervals, keep, stopwatch, run.course)
    keeping = [best, checkpoints, GracefulStop(run.folder, checkpoints.save, resume_command)]

    # What people see of it at its end.
    measured = stopwatch, monitor, run.setpoint, reachability
    final = final_score(run.folder, run.console, best, *measured, stoppers, drift)
    asking = _asking(run, questions, final)

    loggers = [RunLogger(name) for name in run.request.run.loggers]
    leg = f"from-checkpoint-{run.resume.step}" if run.resume else ""  # whatever its folder is called by now
    trainer = build_trainer(
        run.request.trainer,
        run.machine,
        folder=run.folder.path,
        steps=run.length.steps,
        eval_steps=run.validation_interval,
        callbacks=[each for each in (*stoppers, *measuring, *keeping, final, asking) if each],
        loggers=[*_files(run.folder.path / "logs", leg), *loggers],
        plugin=AdapterCheckpointIO(module),
    )
    return trainer, best, final, loggers


def _stoppers(run: PreparedRun, drift: DriftMeter | None) -> list[EquilibriumStop | OwnPatience | TimeLimit]:
    """What may end the run before its last step, the most telling reason first: the time may also run out after
    another one, in the last validation."""
    asked, max_time = run.request.run, run.request.trainer.max_time
    window, every = asked.stop_at_equilibrium, run.request.control.every
    return [
        *([EquilibriumStop(Equilibrium(run.setpoint, window), every)] if window else []),
        *([OwnPatience(asked.early_stopping, drift and drift.within)] if asked.early_stopping else []),
        *([TimeLimit(max_time)] if max_time else []),
    ]


def _drift(run: PreparedRun) -> DriftMeter | None:
    """What measures drift; None where none is held."""
    asked = run.request.drift
    if asked.max_drift is None:
        return None
    step, every = run.length.tokens_per_step, run.request.control.every
    accumulated = run.request.trainer.accumulate_grad_batches
    sizes = anchor_tokens(step, accumulated), steering_tokens(step * every)
    budget, bounds = float(asked.max_drift), (run.controller.lambda_min, run.controller.lambda_max)
    padding = padding_of(run.tokenizer, run.data.rows)
    return DriftMeter(partial(general_data.obtain, run), budget, bounds, *sizes, padding)


def _reachability(run: PreparedRun) -> ReachabilityMonitor | None:
    config = run.request.control
    if not control.tracks(type(run.controller)) or run.setpoint is None:
        return None
    planned = PlannedRates(run.request.optimizer, run.length.steps)
    law, bounds = Reachability(run.setpoint), (config.lambda_min, config.lambda_max)
    return ReachabilityMonitor(law, bounds, planned, in_gradient=config.actuator == "loss")


def _utilisation(run: PreparedRun) -> UtilisationWatch | None:
    expected = run.request.run.expected_mfu
    used = asdict(run.request.base) | asdict(run.request.data) | {"precision": run.machine.precision}
    used |= {"accumulated": run.request.trainer.accumulate_grad_batches}
    return UtilisationWatch(expected, used) if expected else None


def _monitor(run: PreparedRun) -> Monitor:
    length, machine = run.length, run.machine
    return Monitor(
        blocks_per_step=length.tokens_per_step // run.request.data.block_size,
        flops_per_step=length.tokens_per_step * run.size.flops_per_token,
        peak=peaks.peak_flops(machine.device, machine.precision, machine.tf32),
        devices=machine.world_size,
        on_gpu=machine.accelerator == "cuda",
    )


def _progress_line(run: PreparedRun) -> ProgressLine:
    return ProgressLine(
        run.request.trainer.log_every_n_steps,
        run.console,
        lambda done: validations(run.length.steps, done, run.intervals.validation),
        run.scored_blocks / max(1, run.validation_blocks),
    )


def _asking(run: PreparedRun, questions: Callable[..., L.Callback] | None, final: FinalScore) -> L.Callback | None:
    """What asks questions after the scores; None where none are asked for, or can be."""
    count = run.request.run.samples
    if not questions or not count:
        return None
    if run.machine.sharded:  # no process has all of the weights
        log.info("--fsdp: no question is asked at the end; granite-scu eval asks them")
        return None
    return questions(run.folder, run.console, run.tokenizer, count, final)


def _files(logs: Path, leg: str) -> list[Logger]:
    # Each leg of the run has a file of its own: the CSV logger would delete the one it finds.
    # Written at once, so that a crash loses no validation.
    csv = CSVLogger(logs, name="csv", version=leg, flush_logs_every_n_steps=1)
    return [TensorBoardLogger(logs, name="tensorboard", version=""), csv]
