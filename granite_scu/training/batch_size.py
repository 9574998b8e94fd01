"""``--auto-batch-size``: the largest micro-batch that fits, predicted first, then proved by training on it.

An optimizer step keeps its blocks; how many of them are on the device at once changes, and nothing but speed with it.
"""

import logging
from dataclasses import replace

import yaml

from granite_scu.config.request import Request
from granite_scu.errors import RunFailed, UserError
from granite_scu.hardware import GIB
from granite_scu.hardware.machine import Machine
from granite_scu.hardware.measuring import peak_memory, reset_peak_memory
from granite_scu.training import memory_budget
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.short_training import short_training

log = logging.getLogger(__name__)

STEPS = 2
"""Optimizer steps that prove a batch: Adam has its moments after the first."""


def check(resume: str | None, processes: int) -> None:
    """Refuse what the search cannot serve.

    Args:
        resume: what the run is asked to resume from.
        processes: that train.

    Raises:
        UserError: a resumed run, or several processes.
    """
    if resume:
        raise UserError(
            "--auto-batch-size: a resumed run keeps the batch of its checkpoint, on which its place in the data hangs; "
            "leave it out"
        )
    if processes > 1:
        raise UserError(
            "--auto-batch-size: one process looks for the batch; run it once without --multi-gpu, with --max-steps 1, "
            "and give the --batch-size that it finds to all"
        )


def first_guess(request: Request, machine: Machine) -> Request:
    """The request in the largest micro-batches that are predicted to fit.

    Raises:
        UserError: none are.
    """
    found = memory_budget.largest_that_fits(request, machine)
    if found is None:
        least = memory_budget.with_batch(request, 1)
        device = machine.device
        allowed = memory_budget.limit(machine.accelerator, device.memory_gb, request.run.memory_fraction)
        raise UserError(
            f"--auto-batch-size: one block takes {memory_budget.describe(memory_budget.predict(least, machine))}, of "
            f"{allowed / GIB:.2f} GiB that there are on {device.name}; {memory_budget.advice(least, machine)}"
        )
    return found


def prove(run: PreparedRun) -> PreparedRun:
    """Train on the longest micro-batches, smaller ones until one fits; returns the run with it, as if it was asked for.

    The random state of the process is left alone.

    Raises:
        RunFailed: not even one block fits.
    """
    machine = run.machine
    allowed = memory_budget.limit(machine.accelerator, machine.device.memory_gb, run.request.run.memory_fraction)
    for size in memory_budget.sizes(run.request.blocks_per_step, run.request.data.batch_size):
        tried = with_request(run, memory_budget.with_batch(run.request, size))
        predicted = memory_budget.predict(tried.request, machine).total
        taken = _try(tried)
        if taken is not None and taken <= allowed:
            log.info(
                "--auto-batch-size: %d x %d tokens, accumulated %d times, take %.2f GiB of %.2f (predicted: %.2f)",
                *(size, tried.request.data.block_size, tried.request.trainer["accumulate_grad_batches"]),
                *(taken / GIB, allowed / GIB, predicted / GIB),
            )
            return with_request(run, _as_asked_for(tried.request))
        took = "more than there is" if taken is None else f"{taken / GIB:.2f} GiB"
        log.info("--auto-batch-size: %d x %d tokens take %s", size, tried.request.data.block_size, took)
    raise RunFailed(f"--auto-batch-size: not even one block fits; {memory_budget.advice(tried.request, machine)}")


def with_request(run: PreparedRun, request: Request) -> PreparedRun:
    """The run with a request that differs in the size of the micro-batches alone."""
    return replace(run, request=request, data=run.data.with_batch_size(request.data.batch_size))


def _as_asked_for(request: Request) -> Request:
    """The request as if its batch size had been given, also in the YAML that the run folder keeps."""
    given = yaml.safe_load(request.yaml)
    given["data"]["batch_size"] = request.data.batch_size
    given["trainer"]["accumulate_grad_batches"] = request.trainer["accumulate_grad_batches"]
    given["run"]["auto_batch_size"] = False
    settled = replace(request.run, auto_batch_size=False)
    return replace(request, run=settled, yaml=yaml.safe_dump(given, sort_keys=False))


def _try(run: PreparedRun) -> int | None:
    """The most bytes that training takes on top of what the process held; None where there are not so many."""
    device = run.machine.torch_device.type
    before = reset_peak_memory(device)
    accumulated = min(2, run.request.trainer["accumulate_grad_batches"])  # gradients are there all the time
    try:
        short_training(run, STEPS, STEPS, [], limit_val_batches=1, accumulate_grad_batches=accumulated)
    except (RuntimeError, MemoryError) as error:
        if not memory_budget.ran_out(error):
            raise
        return None
    most = peak_memory(device)
    return 0 if most is None or before is None else most - before
