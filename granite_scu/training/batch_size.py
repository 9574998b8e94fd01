"""``--auto-batch-size``: the largest micro-batch that fits, predicted first, then proved by training on it.

An optimizer step keeps its blocks; how many of them are on the device at once changes, and only the speed with it.
"""

import gc
import logging
from dataclasses import replace

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from granite_scu.config.errors import RunFailed, UserError
from granite_scu.config.request import Request
from granite_scu.hardware.detection import GIB, peak_memory, reset_peak_memory
from granite_scu.hardware.machine import Machine
from granite_scu.storage.checkpoint import AdapterCheckpointIO
from granite_scu.training import memory_budget
from granite_scu.training.prepared_run import PreparedRun, build_module
from granite_scu.training.trainer import TimeLimit, build_trainer, fit

log = logging.getLogger(__name__)

STEPS = 2
"""Optimizer steps that prove a batch: Adam has its moments after the first."""


def fit_to_memory(request: Request, machine: Machine) -> Request:
    """With the largest batch that is predicted to fit, if asked for, and checkpointing of activations on or off."""
    if request.run.auto_batch_size:
        request = first_guess(request, machine)
    return memory_budget.with_checkpointing_settled(request, machine)


def first_guess(request: Request, machine: Machine) -> Request:
    """The request in the largest micro-batches that are predicted to fit.

    Raises:
        UserError: none are; or several processes, which the search cannot serve.
    """
    if machine.world_size > 1:
        raise UserError(
            "--auto-batch-size: one process looks for the batch; run it once without --multi-gpu, with --max-steps 1, "
            "and give the --batch-size that it finds to all"
        )
    for candidate in memory_budget.recomputing(request, machine):
        if found := memory_budget.largest_that_fits(candidate, machine):
            return found
    least, allowed = memory_budget.with_batch(request, 1), machine.memory_limit(request.run.memory_fraction)
    raise UserError(
        f"--auto-batch-size: one block takes {memory_budget.describe(memory_budget.predict(least, machine))}, of "
        f"{allowed / GIB:.2f} GiB that there are on {machine.device.name}; {memory_budget.advice(least, machine)}"
    )


def prove(run: PreparedRun) -> PreparedRun:
    """Train on the longest micro-batches, smaller ones until one fits; returns the run with it, as if it was asked for.

    The random state of the process is left alone.

    Raises:
        RunFailed: not even one block fits.
    """
    allowed = run.machine.memory_limit(run.request.run.memory_fraction)
    sizes = memory_budget.sizes(run.request.blocks_per_step, run.request.data.batch_size)
    for number, size in enumerate(sizes, start=1):
        request = memory_budget.with_batch(run.request, size)
        of = f"try {number} of at most {len(sizes)}"
        log.info("finding the batch size: trying %d x %d tokens (%s)", size, request.data.block_size, of)
        tried = replace(run, request=request, data=run.data.served(batch_size=size))
        taken = _try(tried)
        if taken is not None and taken <= allowed:
            predicted = memory_budget.predict(request, run.machine).total
            log.info(
                "--auto-batch-size: %d x %d tokens, accumulated %d times, take %.2f GiB of %.2f (predicted: %.2f)",
                *(size, request.data.block_size, request.trainer.accumulate_grad_batches),
                *(taken / GIB, allowed / GIB, predicted / GIB),
            )
            # As if it had been given, also in the YAML that the run folder keeps.
            found = {
                "data.batch_size": size,
                "trainer.accumulate_grad_batches": request.trainer.accumulate_grad_batches,
                "run.auto_batch_size": False,
            }
            return replace(tried, request=request.with_values(found))
        took = "more than there is" if taken is None else f"{taken / GIB:.2f} GiB"
        log.info("--auto-batch-size: %d x %d tokens take %s", size, request.data.block_size, took)
    raise RunFailed(f"--auto-batch-size: not even one block fits; {memory_budget.advice(request, run.machine)}")


def _try(run: PreparedRun) -> int | None:
    """The most bytes that training takes on top of what the process held; None where there are not so many."""
    device = run.machine.torch_device.type
    before = reset_peak_memory(device)
    try:
        _short_training(run)
    except (RuntimeError, MemoryError) as error:
        if not memory_budget.ran_out(error):
            raise
        return None
    most = peak_memory(device)
    return 0 if most is None or before is None else most - before


def _short_training(run: PreparedRun) -> None:
    """Train a fresh adapter over the first steps of the run, and let go of it. Leaves no file and no random state.

    Model, data, order, seed and learning rates are the run's. Layers are compiled, which takes minutes, only for what
    selective recomputation saves: otherwise they take no less memory.
    """
    accumulated = min(2, run.request.trainer.accumulate_grad_batches)  # gradients are there all the time
    changed = {"limit_val_batches": 1, "accumulate_grad_batches": accumulated}
    settings = replace(run.request.trainer, callbacks=None, logger=None, **changed)
    callbacks = [TimeLimit(settings.max_time)] if settings.max_time else []
    with isolate_rng():
        module = build_module(run, compile=run.request.base.gradient_checkpointing == "selective")
        try:
            module.configure_model()
            trainer = build_trainer(
                settings,
                run.machine,
                folder=run.folder.path,
                steps=STEPS,
                eval_steps=STEPS,
                callbacks=callbacks,
                loggers=[],
                plugin=AdapterCheckpointIO(module),
            )
            fit(trainer, module, run.data, None)
        finally:
            run.data.trainer = None  # which keeps the model, and that the memory of the device
            module = trainer = None
            torch.compiler.reset()  # a second shape would be compiled for all, which is slower
            gc.collect()
            if run.machine.accelerator == "cuda":
                torch.cuda.empty_cache()
