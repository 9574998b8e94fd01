"""``--auto-batch-size``: the largest micro-batch that fits, predicted first, then proved by training on it.

An optimizer step keeps its blocks; how many of them are on the device at once changes, and nothing but speed with it.
"""

import gc
import logging
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from granite_scu.errors import RunFailed, UserError
from granite_scu.hardware import GIB
from granite_scu.hardware.measuring import peak_memory, reset_peak_memory
from granite_scu.storage import checkpoint
from granite_scu.training import memory_budget as budget
from granite_scu.training.trainer import build_trainer

if TYPE_CHECKING:
    from granite_scu.config.request import Request
    from granite_scu.hardware.machine import Machine
    from granite_scu.training.recipe import Run

log = logging.getLogger(__name__)

STEPS = 2
"""Optimizer steps that prove a batch: Adam has its moments after the first."""


def check(request: "Request", machine: "Machine") -> None:
    """Refuse what the search cannot serve.

    Raises:
        UserError: a resumed run, or several processes.
    """
    if request.run.resume:
        raise UserError(
            "--auto-batch-size: a resumed run keeps the batch of its checkpoint, on which its place in the data hangs; "
            "leave it out"
        )
    if machine.world_size > 1:
        raise UserError(
            "--auto-batch-size: one process looks for the batch; run it once without --multi-gpu, with --max-steps 1, "
            "and give the --batch-size that it finds to all"
        )


def first_guess(request: "Request", machine: "Machine") -> "Request":
    """The request in the largest micro-batches that are predicted to fit.

    Raises:
        UserError: none are.
    """
    found = budget.largest_that_fits(request, machine)
    if found is None:
        least = budget.with_batch(request, 1)
        room = f"{budget.limit(request, machine) / GIB:.2f} GiB"
        raise UserError(
            f"--auto-batch-size: one block takes {budget.in_words(budget.predict(least, machine))}, of {room} that "
            f"there are on {machine.device.name}; {budget.advice(least, machine)}"
        )
    return found


def prove(run: "Run") -> "Request":
    """Train on the longest micro-batches, smaller ones until one fits; returns the request with it.

    The random state of the process is left alone.

    Raises:
        RunFailed: not even one block fits.
    """
    request, machine = run.request, run.machine
    allowed = budget.limit(request, machine)
    for size in budget.sizes(request, request.data.batch_size):
        run.take_request(budget.with_batch(request, size))
        predicted = budget.predict(run.request, machine).total
        with isolate_rng():
            taken = _try(run)
        if taken is not None and taken <= allowed:
            log.info(
                "--auto-batch-size: %d x %d tokens, accumulated %d times, take %.2f GiB of %.2f (predicted: %.2f)",
                *(size, request.data.block_size, run.request.trainer["accumulate_grad_batches"]),
                *(taken / GIB, allowed / GIB, predicted / GIB),
            )
            return run.request
        took = "more than there is" if taken is None else f"{taken / GIB:.2f} GiB"
        log.info("--auto-batch-size: %d x %d tokens take %s", size, request.data.block_size, took)
    raise RunFailed(f"--auto-batch-size: not even one block fits; {budget.advice(run.request, machine)}")


def _try(run: "Run") -> int | None:
    """The most bytes that training takes on top of what the process held; None where there are not so many."""
    device = run.machine.torch_device.type
    before = reset_peak_memory(device)
    try:
        _train(run)
    except (RuntimeError, MemoryError) as error:
        if not budget.ran_out(error):
            raise
        return None
    finally:
        run.data.trainer = None  # it would keep the model, and the model the device's memory
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    most = peak_memory(device)
    return 0 if most is None or before is None else most - before


def _train(run: "Run") -> None:
    module = run.make_module(compile=False)  # what is compiled takes no more
    module.configure_model()
    settings = run.request.trainer
    settings = settings | {
        "callbacks": None,
        "logger": None,
        "limit_val_batches": 1,
        "accumulate_grad_batches": min(2, settings["accumulate_grad_batches"]),  # gradients are there all the time
    }
    trainer = build_trainer(
        settings,
        run.machine,
        steps=STEPS,
        eval_steps=STEPS,
        callbacks=[],
        loggers=[],
        plugin=checkpoint.AdapterCheckpointIO(),
    )
    run.train(trainer, module, None)
