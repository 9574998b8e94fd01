"""What a run takes of its device's memory, what it may take, and what to change where that is not enough."""

import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import torch

from granite_scu.config.errors import RunFailed
from granite_scu.config.request import Request
from granite_scu.config.settings import MAX_BATCH, Recomputed, listed
from granite_scu.control import units
from granite_scu.hardware.detection import GIB, ram
from granite_scu.hardware.machine import Machine
from granite_scu.model import loading, memory
from granite_scu.model.base_files import IN_4_BITS, quantised_by
from granite_scu.model.compilation import can_keep_products, check_selective
from granite_scu.model.loading import WEIGHT_DTYPES

SHORTEST = 256
"""Tokens below which a block is not proposed to be cut."""

NO_MEMORY = ("DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In errors of a CPU's allocator, and of CUDA where PyTorch's own allocator is not the one that asked."""


def predict(request: Request, machine: Machine) -> memory.Footprint:
    """What a run takes of its device at its peak, the program itself and CUDA's context apart."""
    return memory.predict(loading.known_config(request.base.name), setting_of(request, machine))


def setting_of(request: Request, machine: Machine) -> memory.Setting:
    """What the memory and the time of a run's steps depend on."""
    # An adapter to start from may name its layers in other ways, and of a layer with a full name the place may be left
    # out of the simulation; all of them are a bound.
    by_place = any("." in target for target in listed(request.lora.targets))
    lora = replace(request.lora, targets=None) if request.lora.adapter or by_place else request.lora
    in_4_bits = request.base.quantize_4bit or quantised_by(loading.known_config(request.base.name)) == IN_4_BITS
    return memory.Setting(
        replace(request.base, attention=machine.attention, quantize_4bit=in_4_bits),
        lora,
        WEIGHT_DTYPES[machine.precision],
        request.data.batch_size,
        request.data.block_size,
        machine.accelerator,
        machine.world_size,
        request.data.isolate_documents,
        machine.devices if machine.sharded else 1,
    )


def with_batch(request: Request, size: int) -> Request:
    """The same request in micro-batches of ``size`` blocks; a divisor of the step's blocks, which stay as many."""
    assert request.blocks_per_step % size == 0
    trainer = replace(request.trainer, accumulate_grad_batches=request.blocks_per_step // size)
    return replace(request, data=replace(request.data, batch_size=size), trainer=trainer)


def with_checkpointing_settled(request: Request, machine: Machine) -> Request:
    """The request with its activations recomputed, or not: where nothing is asked for, the fastest way that fits.

    Raises:
        UserError: as ``compilation.check_selective`` does.
    """
    if request.base.gradient_checkpointing == "selective":
        check_selective(machine.compiled)
    *faster, last = recomputing(request, machine)
    # Of a model that cannot be simulated the last, which takes least.
    return next((way for way in faster if fits(way, machine) and predict(way, machine).step is not None), last)


def recomputing(request: Request, machine: Machine) -> list[Request]:
    """The request as it is, or where it leaves open whether activations are recomputed, each way, fastest first."""
    if request.base.gradient_checkpointing is not None:
        return [request]
    return [_recomputing(request, how) for how in (False, *_slower(False, machine))]


def _slower(how: Recomputed, machine: Machine) -> list[Recomputed]:
    """The ways to recompute that there are here and that take less memory than this one, fastest first."""
    ways: list[Recomputed] = ["selective"] if machine.compiled and can_keep_products() else []
    return {False: [*ways, True], "selective": [True], True: []}[how]


def _recomputing(request: Request, how: Recomputed) -> Request:
    return replace(request, base=replace(request.base, gradient_checkpointing=how))


def fits(request: Request, machine: Machine) -> bool:
    """Whether a run's steps fit into what it may take of the memory."""
    return predict(request, machine).total <= machine.memory_limit(request.run.memory_fraction)


def sizes(blocks: int, most: int | None = None) -> list[int]:
    """The micro-batches that a step of so many blocks can be cut into, largest first, none above ``most``."""
    return [size for size in range(min(blocks, most or MAX_BATCH), 0, -1) if blocks % size == 0]


def largest_that_fits(request: Request, machine: Machine, most: int | None = None) -> Request | None:
    """The request in the largest micro-batches, up to ``most`` blocks, that fit by prediction; None if one does not.

    A larger batch takes more, so that halving the candidates finds it.
    """
    candidates = [with_batch(request, size) for size in sizes(request.blocks_per_step, most)]
    first = bisect_left(candidates, True, key=lambda candidate: fits(candidate, machine))
    return candidates[first] if first < len(candidates) else None


def advice(request: Request, machine: Machine) -> str:
    """The first change that is predicted to make the run fit, as flags; what costs least comes first."""
    for changed in _changes(request, machine):
        most = request.data.batch_size - (changed is request)  # a smaller batch, where nothing else changes
        found = largest_that_fits(changed, machine, max(1, most))
        if found is not None and found != request:
            return _try(request, found, machine)
    return "no batch, block or quantisation of it is predicted to fit: take a smaller --model, or a larger device"


def advice_to_continue(request: Request, machine: Machine) -> str:
    """The same for a run that continues, which keeps its batch and its blocks."""
    ways = (_recomputing(request, how) for how in _slower(request.base.gradient_checkpointing or False, machine))
    fitting = next((f"{_try(request, way, machine)}, " for way in ways if fits(way, machine)), "")
    return (
        f"{fitting}where it was validating give a smaller --eval-batch-size, or with a smaller --batch-size start "
        "another run from its adapter by --adapter"
    )


def _try(before: Request, after: Request, machine: Machine) -> str:
    footprint = predict(after, machine)
    predicted = "" if footprint.step is None else f" (predicted: {footprint.total / GIB:.2f} GiB)"
    return f"try {_flags(before, after)}{predicted}"


def _changes(request: Request, machine: Machine) -> Iterator[Request]:
    yield request
    for how in _slower(request.base.gradient_checkpointing or False, machine):
        yield _recomputing(request, how)
    base = replace(request.base, gradient_checkpointing=True)
    if not base.quantize_4bit and not request.run.fsdp and find_spec("bitsandbytes"):
        base = replace(base, quantize_4bit=True)
        yield replace(request, base=base)
    length = request.data.block_size
    while (length := length // 2) >= SHORTEST:
        yield replace(request, base=base, data=replace(request.data, block_size=length))


def _flags(before: Request, after: Request) -> str:
    """What differs, as the script's flags."""
    recomputed = [{True: "on"}.get(how, how) for how in (r.base.gradient_checkpointing for r in (before, after))]
    settings = (
        ("--batch-size {}", before.data.batch_size, after.data.batch_size),
        ("--gradient-accumulation-steps {}", *(r.trainer.accumulate_grad_batches for r in (before, after))),
        ("--gradient-checkpointing {}", *recomputed),
        ("--4bit-quantization", before.base.quantize_4bit, after.base.quantize_4bit),
        ("--block-size {}", before.data.block_size, after.data.block_size),
    )
    return " ".join(flag.format(new) for flag, old, new in settings if old != new)


def describe(footprint: memory.Footprint) -> str:
    """Such as ``8.41 GiB: weights 2.72, adapters 0.26, step 5.43``."""
    parts = (("weights", footprint.weights), ("adapters", footprint.adapters), ("step", footprint.step))
    known = (f"{name} {'not predicted' if size is None else f'{size / GIB:.2f}'}" for name, size in parts)
    return f"{footprint.total / GIB:.2f} GiB: {', '.join(known)}"


def ran_out(error: BaseException) -> bool:
    """Whether an error says that a device had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in NO_MEMORY)


@contextmanager
def explain_oom(request: Request, machine: Machine, continues: bool = False) -> Iterator[None]:
    """Make one line of an error about memory: what was asked for, what there was, and what to try next.

    Args:
        request: the run's.
        machine: what it is on.
        continues: whether the run continues from a checkpoint, and has to keep its batch.

    Raises:
        RunFailed: in its place.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        remedy = (advice_to_continue if continues else advice)(request, machine)
        if not continues and machine.world_size == 1:  # several processes search for none
            remedy += ", or let --auto-batch-size find the batch"
        asked = _asked(error, machine.accelerator)
        raise RunFailed(f"out of memory on {machine.device.name}: {asked}; {remedy}") from error


def _asked(error: BaseException, accelerator: str) -> str:
    found = re.search(r"allocate ([\d.]+) ?(GiB|MiB|KiB|bytes)", str(error))
    sizes = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
    wanted = units.memory(float(found[1]) * sizes[found[2]]) if found else "more"
    if accelerator == "cpu":
        return f"{wanted} asked for, {ram()[1] / GIB:.1f} GiB available"
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_allocated()
    return f"{wanted} asked for, {free / GIB:.1f} of {total / GIB:.1f} GiB free, {held / GIB:.1f} held by this run"
