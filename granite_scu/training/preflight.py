"""What a run will cost, said before it starts. Estimates, and marked as such."""

import logging
from typing import Any

import torch

from granite_scu import hardware
from granite_scu.config.request import Request
from granite_scu.config.settings import IGNORED
from granite_scu.control import PI, Controller
from granite_scu.control.laws.auto import FREE, SHORT, START
from granite_scu.control.laws.wrapper import Wrapper
from granite_scu.data.workers import errors_in_one_line
from granite_scu.hardware.machine import Machine
from granite_scu.model.document_mask import can_isolate
from granite_scu.model.loading import WEIGHT_DTYPES, announce_kernels
from granite_scu.storage.recording import recorded_weight
from granite_scu.training import memory_budget
from granite_scu.training.prepared_run import PreparedRun

log = logging.getLogger(__name__)


FEED_FORWARD_ERROR = 3.0
"""Factor within which the lambda that PI starts from is what holds S*; see ``control.pi``."""

SAME_WEIGHT = 1.1
"""Factor within which two runs' sigma^2 N count as one. The training text of another seed differs by less."""

FEW = 5
"""Held-out documents below which S* follows their peculiarities."""

UTILISATION = 0.3
"""Share of the measured matrix-product rate that a training step is assumed to reach."""


def describe(run: PreparedRun) -> dict:
    """The plan of a run as readable facts: steps, tokens, first batch, memory and time estimates.

    Memory: what ``model.memory`` finds. Time: the operations of ``model.flops`` at ``UTILISATION`` of the rate that
    matrix products are measured to have here.
    """
    request, length, machine, size = run.request, run.length, run.machine, run.size
    dtype = WEIGHT_DTYPES[machine.precision]
    with errors_in_one_line():
        batch = next(iter(run.data.train_dataloader()))
    rate = hardware.matmul_tflops(machine.device.kind, dtype, tf32=machine.tf32) * 1e12 * UTILISATION
    seconds = length.steps * length.tokens_per_step / machine.world_size * size.flops_per_token / rate
    return {
        "model": request.base.name,
        "parameters": f"{size.frozen:,} frozen, {size.trained:,} trained in {len(size.adapted)} adapters",
        "data": run.data.summary(),
        "first_batch": f"{tuple(batch['input_ids'].shape)} tokens, {(batch['labels'] != IGNORED).sum():,} supervised",
        "device": machine.device.name,
        "precision": machine.precision,
        "processes": machine.world_size,
        "steps": length.steps,
        "tokens_per_step": length.tokens_per_step,
        "tokens": length.steps * length.tokens_per_step,
        "n_tokens": length.n_tokens,
        "controller": request.control.controller,
        "target_s": "auto: moved at every tick" if run.controller.needs_slopes else run.controller.setpoint,
        "s_ceiling_estimate": None if run.s_ceiling is None else float(f"{run.s_ceiling:.3g}"),
        **({"target_s_advice": "; ".join(warnings)} if (warnings := out_of_reach(run)) else {}),
        **_memory(request, machine),
        "time_s_estimate": round(seconds),
        "output_dir": str(run.folder.path),
    }


def _memory(request: Request, machine: Machine) -> dict:
    """What the run takes of the device's memory, what it may take, and what to change where that is less; GiB."""
    footprint = memory_budget.predict(request, machine)
    allowed = machine.memory_limit(request.run.memory_fraction)
    fits = footprint.total <= allowed
    return {
        "batch": f"{request.data.batch_size} x {request.data.block_size} tokens, accumulated "
        f"{request.trainer['accumulate_grad_batches']} times",
        "memory_gib_estimate": round(footprint.total / hardware.GIB, 3),
        "memory_parts": memory_budget.describe(footprint),
        "memory_gib_allowed": round(allowed / hardware.GIB, 3),
        "memory_fits": fits,
        **({} if fits else {"memory_advice": memory_budget.advice(request, machine)}),
    }


def out_of_reach(run: PreparedRun) -> list[str]:
    """Why the run's setpoint cannot be expected to be held and what to change, a line each; none where it can be.

    Of ``identify`` too, whose laws act around one that holds a setpoint. A setpoint that moves is not judged.
    """
    setpoint = run.controller.setpoint
    if setpoint is None:
        return []
    warnings = beyond_the_ceiling(setpoint, run.s_ceiling), beyond_the_bounds(run.controller)
    return [warning for warning in warnings if warning]


def beyond_the_ceiling(setpoint: float, most: float | None) -> str | None:
    """A warning in one line, if the setpoint lies above the ceiling."""
    if most is None or setpoint <= most:
        return None
    return (
        f"S* = {setpoint:.3g} cannot be expected: with this many steps at these learning rates S comes to {most:.2g} "
        "at the very most, and usually to a fraction of that; lower --target-s (auto finds one), train longer, raise "
        "--learning-rate, or take a smaller --prior-sigma (sigma and S* are one knob: only sigma^2 N counts)"
    )


def beyond_the_bounds(controller: Controller[Any]) -> str | None:
    """A warning in one line, if the lambda that PI expects to hold its setpoint lies far beyond a bound."""
    law = controller.law if isinstance(controller, Wrapper) else controller
    if not isinstance(law, PI):
        return None
    wanted, low, high = law.feed_forward, law.lambda_min, law.lambda_max
    if low / FEED_FORWARD_ERROR <= wanted <= high * FEED_FORWARD_ERROR:
        return None
    flag, bound, change, other, side = (
        ("--lambda-max", high, "raise", "raise --target-s", "above")
        if wanted > high
        else ("--lambda-min", low, "lower", "lower --target-s", "below")
    )
    return (
        f"{flag} {bound:g}: S* = {law.setpoint:.3g} is expected to take a lambda of {wanted:.2g}, so S may come "
        f"to rest {side} it with lambda on that bound; {change} {flag} to {wanted:.2g} or further, or {other}"
    )


# What the log has before the first step


def announce(run: PreparedRun, model: torch.nn.Module) -> None:
    """Say it all. The model is loaded, and its adapters are in place."""
    request = run.request
    announce_kernels(model)
    if request.base.compile:
        log.info("--torch-compile: the first steps compile the layers for their shapes, which may take minutes")
    if request.data.isolate_documents and not can_isolate(model, run.machine.attention):
        log.warning(
            "%s has recurrent layers that carry their state from one document of a block into the next; "
            "--no-isolate-documents says that this is meant",
            request.base.name,
        )
    if run.start and (mismatch := run.start.mismatch(request.base.quantize_4bit)):
        log.warning(mismatch)
    if run.controller.needs_slopes:
        log.info("--target-s auto: %s", moved_by(run))
    replay, weight = request.control.replay, request.prior.sigma**2 * run.length.n_tokens
    for warning in (replay and other_weight(replay, weight), *out_of_reach(run)):
        if warning:
            log.warning(warning)


def moved_by(run: PreparedRun) -> str:
    """What the setpoint is moved by in this run, in one line."""
    ticks, documents = run.length.steps // run.request.control.every, run.data.validation.n_documents
    start = f"starts at {FREE:.0%}, where lambda does little" if ticks < SHORT else f"starts at {START:.0%}"
    begins = "continues where the checkpoint has it" if run.resume else start
    by = f"{documents} held-out document{'s' * (documents != 1)}"
    few = f"; {by}, and what so few say may not hold for other text" if documents < FEW else f"; {by} move it"
    if ticks < SHORT:
        return (
            f"S* {begins}: {ticks} ticks are too few to find it{few}. Set a smaller --control-every or train for "
            f"longer; it takes {SHORT}"
        )
    return f"S* {begins}, and moves at each of {ticks} ticks{few}"


def other_weight(path: str, here: float) -> str | None:
    """A warning in one line, where the lambda that is replayed had another penalty to weigh.

    Args:
        path: of the recording.
        here: sigma^2 N of this run.
    """
    there = recorded_weight(path)
    if not there or 1 / SAME_WEIGHT < here / there < SAME_WEIGHT:
        return None
    return (
        f"--replay {path}: its run had sigma^2 N = {there:.3g} and this one has {here:.3g}, so the same lambda holds "
        f"the adapter {there / here:.3g} times as hard; --prior-sigma and --n-tokens set both"
    )
