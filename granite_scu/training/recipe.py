"""A training run from what was asked for to the run folder, top to bottom: ``prepare``, then ``train``."""

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from granite_scu import control, hardware
from granite_scu.config.errors import UserError
from granite_scu.config.progress import say
from granite_scu.config.request import Request
from granite_scu.config.settings import check_drift, check_refused
from granite_scu.control.diagnostics import ceiling
from granite_scu.control.diagnostics.equilibrium import Equilibrium
from granite_scu.control.diagnostics.reachability import Reachability
from granite_scu.data.blocks.packing import padding_of
from granite_scu.data.datamodule import TextDataModule
from granite_scu.data.streaming import StreamedDataModule
from granite_scu.data.tokens import templates
from granite_scu.hardware import machine as machines
from granite_scu.hardware import presets
from granite_scu.model import flops, initial_adapter, loading
from granite_scu.model.drift import anchor_tokens, steering_tokens
from granite_scu.model.mamba2 import kernels
from granite_scu.storage import checkpoint
from granite_scu.storage.run_folder import BEST_ADAPTER, RunFolder
from granite_scu.training import batch_size, general_data, memory_budget
from granite_scu.training.callbacks.audit import AdapterAudit
from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.checkpoints import Checkpoints
from granite_scu.training.callbacks.drift import DriftMeter
from granite_scu.training.callbacks.early_stopping import OwnPatience
from granite_scu.training.callbacks.equilibrium import EquilibriumStop
from granite_scu.training.callbacks.final_score import FinalScore
from granite_scu.training.callbacks.held_out_savings import Savings
from granite_scu.training.callbacks.progress import ProgressLine
from granite_scu.training.callbacks.reachability import ReachabilityMonitor
from granite_scu.training.callbacks.samples import Samples
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.signals import GracefulStop
from granite_scu.training.callbacks.stopwatch import Stopwatch
from granite_scu.training.callbacks.threads import FreeCores, may_change
from granite_scu.training.callbacks.throughput import Monitor
from granite_scu.training.callbacks.utilisation import UtilisationWatch
from granite_scu.training.controller import (
    build_controller,
    check_equilibrium_stop,
    check_held_out,
    check_length,
    check_slopes,
    drift_law,
    without_validation,
)
from granite_scu.training.fitting import fitted
from granite_scu.training.learning_rate import PlannedRates
from granite_scu.training.logger_checks import check_loggers
from granite_scu.training.loggers import RunLogger, logging_to
from granite_scu.training.output_folder import claimed, is_main, open_run_folder
from granite_scu.training.preflight import announce
from granite_scu.training.prepared_run import PreparedRun, build_module, intervals_of, length_of, validations
from granite_scu.training.resume import (
    Resume,
    as_before,
    blamed,
    check_base,
    check_blocks,
    check_resumable,
    course_of,
    holds_nan,
    open_checkpoint,
    warn_of_changes,
    warn_of_newer,
)
from granite_scu.training.trainer import TimeLimit, build_trainer, conclude, fit, given_objects, kill_children, part

log = logging.getLogger(__name__)


def prepare(
    request: Request,
    console: Console | None = None,
    *,
    controller: control.Controller | None = None,
    data: TextDataModule | None = None,
    card: hardware.Device | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreparedRun:
    """Refuse what can be refused without loading a model. Makes no run folder; what it tokenises is cached.

    Args:
        request: what is asked for.
        console: where progress goes.
        controller: steers in place of the one that ``request.control`` describes.
        data: is trained on in place of what ``request.data`` describes; not yet prepared.
        card: is planned for in place of this machine's device; such a run can be described, not trained.
        tokenizer: in place of the model's own.

    Raises:
        UserError: the request cannot be met on this machine, or its data is wrong.
    """
    # What no machine and no text can change.
    given_objects(request.trainer)
    check_loggers(request.run.loggers, request.run.logger_offline)
    law = controller or build_controller(request.control)
    if request.run.stop_at_equilibrium:
        check_equilibrium_stop(request.control)

    # The run folder, and the checkpoint that the run continues from.
    folder = RunFolder(request.run.output_dir)
    resume = open_checkpoint(request.run.resume, folder.path)
    with claimed(folder, request, resume):
        pass  # refused already here; until the run starts, others may have the folder
    if resume:
        request = as_before(request, resume)

    # The model's tokenizer with the chat template, and the adapter to start from.
    tokenizer = templates.of_data(tokenizer or loading.load_tokenizer(request.base.name), request.data)
    start = _open_start(request, resume, law)
    if start:
        request = replace(request, lora=initial_adapter.lora_of(request.lora, start))
    config = loading.known_config(request.base.name)
    _check_block_size(config, request)

    # What the model has to compute; layers that it has not are refused here.
    size = flops.measure(request.base.name, request.lora, request.data.block_size, start and start.shapes)

    # The machine: what is wrong with the request itself has been said.
    machine = machines.resolve_request(request, card)
    if not card:
        kernels.check(machine.kernels, machine.accelerator)
    machine = _with_attention_of(config, machine, request.base.attention)
    request = replace(request, base=replace(request.base, compile=machine.compiled))
    if warning := presets.mismatch(request.hardware, machine.device):
        log.warning(warning)

    # The text, and what nobody gave of blocks, steps, rate and controller, fitted to it.
    data, console = data or build_data(request), console or Console()
    say(f"reading the text {request.data.named}", console)
    data.read(tokenizer, loading.rows_of(config), request.base.name)
    block = request.data.block_size
    if controller:
        request = replace(request, given=request.given | {"control.controller"})
    request, chosen = fitted(request, data, tokenizer, config, machine.world_size)
    if not data.holds_out("validation"):
        request = without_validation(request, controller or build_controller(request.control))
    size = size.in_blocks(request.base.name, block, request.data.block_size)

    # The micro-batch that is predicted to fit, and whether activations have to be recomputed for it.
    asked = request.data.batch_size
    if request.run.auto_batch_size:
        request = batch_size.first_guess(request, machine)
    request = memory_budget.with_checkpointing_settled(request, machine)
    data.config = replace(data.config, batch_size=request.data.batch_size)

    # N and the length of the run.
    data.check_processes(machine.world_size)
    length = length_of(request, data.train.n_blocks, data.n_tokens, machine.world_size)

    # How far the adapters can move.
    prior = (request.prior.sigma, length.n_tokens)
    if start:
        growth = ceiling.growth_from(start.matrices, *prior)
    else:
        growth = ceiling.growth([(out, rank) for out, _, rank in size.adapted], request.lora.scale, *prior)

    # The law of lambda.
    every = intervals_of(request.run, length.steps).validation
    law = controller or build_controller(request.control, length.steps)
    check_length(law, request.control, request.run, request.data.stream, length.steps, every)
    general = None
    if request.drift.max_drift:
        check_drift(request.control.every, length.steps)
        controller = drift_law(request)
        general = general_data.read(request, resume, data, tokenizer, loading.rows_of(config), machine.sharded)
    controller = controller or law
    if controller.needs_slopes:
        check_slopes(request.control.every, length.steps)
        if not resume:  # it continues with the data and the batch that it has
            check_held_out(data.validation.n_blocks, min(asked, request.data.batch_size), machine.world_size)
    run = PreparedRun(
        request=request,
        console=console,
        machine=machine,
        folder=folder,
        resume=resume,
        tokenizer=tokenizer,
        start=start,
        data=data,
        length=length,
        size=size,
        growth=growth if request.control.measure == "delta" else None,  # factors are not zero at the start
        controller=controller,
        general=general,
        chosen=chosen,
    )

    # What must be the same as at the checkpoint, and what has changed.
    if resume:
        with blamed(resume):
            course = _course(run)
            check_blocks(resume, course, data.checksum)
            build_module(run).require_same_settings(resume.state, size.trained)
            check_resumable(resume, type(controller).__name__, length.steps, course, request.run.overwrite)
            warn_of_changes(resume, course)
            warn_of_newer(resume)
    return run


def train(
    run: PreparedRun,
    *,
    final_score: Callable[..., FinalScore] = FinalScore,
    again: str = "the same settings, and the checkpoint to resume from",
) -> dict:
    """Train, score and write the run folder; returns the summary that ``scu_metrics.json`` holds.

    Args:
        run: the run.
        final_score: makes the callback that scores and saves at the end, of ``FinalScore``'s arguments.
        again: the command that continues the run, for whoever stops it.
    """
    L.seed_everything(run.request.seed, workers=True, verbose=False)
    with claimed(run.folder, run.request, run.resume):
        # What is found by trying.
        run.machine.claim(run.request.run.memory_fraction)
        if run.request.run.auto_batch_size:
            run = batch_size.prove(run)
        with memory_budget.explained(run.request, run.machine):
            # The model and its adapters.
            module = build_module(run)
            course = _course(run)
            if run.resume:  # again, now that no other process has the folder
                law, overwrite = type(run.controller).__name__, run.request.run.overwrite
                check_resumable(run.resume, law, run.length.steps, course, overwrite)
            say(f"loading the model {run.request.base.name}", run.console)
            module.configure_model()
            if run.resume:
                check_base(run.resume, run.request.base.name)

            # What measures, steers, scores and saves.
            plugin = checkpoint.AdapterCheckpointIO(module)
            loggers = [RunLogger(name) for name in run.request.run.loggers]
            trainer, best, final = _assemble(run, course, plugin, final_score, again, loggers)
            if run.resume:
                with blamed(run.resume):
                    module.on_load_checkpoint(run.resume.state)
                    run.data.start_at(run.resume.state["micro_batches"])

            # Only now is the folder touched: a request that is refused loses nothing.
            if is_main():
                open_run_folder(run)
                announce(run, module.language_model)
            if run.resume:
                say(f"continuing from {run.resume.path.name} at step {run.resume.step}", run.console)
                best.resume(run.resume.path / BEST_ADAPTER, write=is_main())

            # The training itself, and the score at its end.
            first_step = run.resume.step if run.resume else 0
            sound = run.resume is None or not holds_nan(run.resume.state)
            with logging_to(loggers, run):
                try:
                    with blamed(run.resume, lambda: sound and trainer.global_step > first_step):
                        fit(trainer, module, run.data, run.resume and run.resume.path)
                    if trainer.global_step == first_step:
                        with blamed(run.resume, lambda: sound):
                            conclude(trainer, module)
                except BaseException:
                    kill_children(trainer)
                    raise
                part(trainer)
            return final.summary


def build_data(request: Request) -> TextDataModule:
    """The text that a request describes, not yet prepared."""
    kind = StreamedDataModule if request.data.stream else TextDataModule
    return kind(request.data, request.seed, uniform_batches=bool(request.base.compile))


def _course(run: PreparedRun) -> dict[str, Any]:
    return course_of(run.request, run.machine, run.length.steps, run.setpoint, run.intervals.validation)


def _open_start(
    request: Request, resume: Resume | None, law: control.Controller
) -> initial_adapter.InitialAdapter | None:
    path, base = request.lora.adapter, request.base.name
    if path is None:
        return None
    initial_adapter.check_actuator(request.control.actuator)
    check_refused(request.control.controller, law, ["--adapter"])
    if resume and not Path(path).expanduser().is_dir():  # the checkpoint has all that is needed of it
        return initial_adapter.from_checkpoint(resume.path, path, base, resume.state["frozen"])
    return initial_adapter.open_start(path, base)


def _check_block_size(config: PretrainedConfig, request: Request) -> None:
    width, size = getattr(config, "mamba_d_conv", 0), request.data.block_size
    if size < width:
        raise UserError(
            f"--block-size {size}: shorter than the {width} tokens that a convolution of {request.base.name} spans"
        )


def _with_attention_of(config: PretrainedConfig, machine: machines.Machine, asked: str) -> machines.Machine:
    """The machine, its attention one that the model has; says so where that is not the usual one."""
    attention = loading.fitting_attention(config, asked, machine.attention)
    if attention != machine.attention:
        log.info("--attn auto: %s, as %s models have no %s", attention, config.model_type, machine.attention)
    return replace(machine, attention=attention)


def _assemble(
    run: PreparedRun,
    course: dict[str, Any],
    plugin: checkpoint.AdapterCheckpointIO,
    final_score: Callable[..., FinalScore],
    again: str,
    loggers: list[RunLogger],
) -> tuple[L.Trainer, BestAdapter, FinalScore]:
    """The Trainer with its callbacks in their order: each comes after those whose work it needs."""
    asked, settings, setpoint = run.request.run, run.request.trainer, run.setpoint
    every, window, max_time = run.request.control.every, asked.stop_at_equilibrium, settings["max_time"]
    # What listens to every tick.
    line = ProgressLine(
        settings["log_every_n_steps"],
        run.console,
        lambda done: validations(run.length.steps, done, run.intervals.validation),
        run.scored_blocks / max(1, run.validation_blocks),
    )
    reachability = _reachability(run)
    used = asdict(run.request.base) | asdict(run.request.data) | {"precision": run.machine.precision}
    utilisation = UtilisationWatch(asked.expected_mfu, used) if asked.expected_mfu else None
    equilibrium = EquilibriumStop(Equilibrium(setpoint, window), every) if window else None
    drift = _drift(run)
    listeners = [listener for listener in (reachability, drift, equilibrium, utilisation, line) if listener]
    # What measures, steers and keeps.
    stopwatch, monitor = Stopwatch(), _monitor(run)
    best = BestAdapter(run.folder.path / BEST_ADAPTER, drift and drift.budget, drift and drift.share)
    record = run.folder.append_history
    scu = ShannonControl(run.controller, every, stopwatch, record, monitor, listeners, drift and drift.plant)
    savings = Savings(scu.set_benefit, stopwatch) if getattr(run.controller, "needs_benefit", False) else None
    validates = run.intervals.validation if run.data.holds_out("validation") else None
    checkpoints = Checkpoints(run.folder, run.intervals.checkpoint, validates, asked.keep, stopwatch, course)
    # What ends it. The time is the last of the reasons: it may also run out after another one, in the last validation.
    patience = OwnPatience("val_bpt", patience=asked.early_stopping) if asked.early_stopping else None
    limit = TimeLimit(max_time) if max_time else None
    stoppers = [stopper for stopper in (equilibrium, patience, limit) if stopper]
    final = final_score(run.folder, run.console, best, stopwatch, monitor, setpoint, reachability, stoppers, drift)
    samples = _samples(run, final, line)
    cores = FreeCores() if may_change(run.machine.accelerator, bool(settings.get("deterministic"))) else None
    callbacks = [
        limit, cores, drift, stopwatch, AdapterAudit(), scu, reachability, best, savings, equilibrium, patience, line,
        checkpoints, GracefulStop(run.folder, checkpoints.save, again), final, samples,
    ]  # fmt: skip
    trainer = build_trainer(
        settings,
        run.machine,
        steps=run.length.steps,
        eval_steps=validates,
        callbacks=[callback for callback in callbacks if callback],
        loggers=[*_files(run.folder.path / "logs", f"from-{run.resume.path.name}" if run.resume else ""), *loggers],
        plugin=plugin,
    )
    return trainer, best, final


def _samples(run: PreparedRun, final: FinalScore, line: ProgressLine) -> Samples | None:
    count = run.request.run.samples
    if count and run.machine.sharded:  # no process has all of the weights
        log.info("--fsdp: no question is asked at the end; granite-scu eval asks them")
        return None
    return Samples(run.folder, run.console, run.tokenizer, count, final, line) if count else None


def _drift(run: PreparedRun) -> DriftMeter | None:
    """What measures drift; None where none is held."""
    asked = run.request.drift
    if asked.max_drift is None:
        return None
    step, every = run.length.tokens_per_step, run.request.control.every
    sizes = anchor_tokens(step), steering_tokens(step * every)
    budget, bounds = float(asked.max_drift), (run.controller.lambda_min, run.controller.lambda_max)
    return DriftMeter(partial(general_data.obtain, run), budget, bounds, *sizes, padding_of(run.tokenizer))


def _monitor(run: PreparedRun) -> Monitor:
    length, machine = run.length, run.machine
    return Monitor(
        blocks_per_step=length.tokens_per_step // run.request.data.block_size,
        flops_per_step=length.tokens_per_step * run.size.flops_per_token,
        peak=hardware.peak_flops(machine.device, machine.precision, machine.tf32),
        devices=machine.world_size,
        on_gpu=machine.accelerator == "cuda",
    )


def _reachability(run: PreparedRun) -> ReachabilityMonitor | None:
    config = run.request.control
    if not control.tracks(type(run.controller)) or run.setpoint is None:
        return None
    planned = PlannedRates(run.request.optimizer, run.length.steps)
    law, bounds = Reachability(run.setpoint, run.growth), (config.lambda_min, config.lambda_max)
    return ReachabilityMonitor(law, bounds, planned, in_gradient=config.actuator == "loss")


def _files(logs: Path, leg: str) -> list[TensorBoardLogger | CSVLogger]:
    # Each leg of the run has a file of its own: the CSV logger would delete the one it finds.
    # Written at once, so that a crash loses no validation.
    csv = CSVLogger(logs, name="csv", version=leg, flush_logs_every_n_steps=1)
    return [TensorBoardLogger(logs, name="tensorboard", version=""), csv]
