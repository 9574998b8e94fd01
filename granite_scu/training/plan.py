"""The plan of a run: what it trains on what, and what that will cost. Estimates are marked as such."""

from typing import Any

import torch

from granite_scu import hardware
from granite_scu.config.request import Request
from granite_scu.config.settings import IGNORED, listed
from granite_scu.control.units import per_cent
from granite_scu.data.workers import errors_in_one_line
from granite_scu.hardware.machine import Machine
from granite_scu.hardware.peaks import printed_peak
from granite_scu.model import loading, memory, step_time
from granite_scu.model.loading import WEIGHT_DTYPES
from granite_scu.training import memory_budget
from granite_scu.training.callbacks.samples import MAX_SECONDS
from granite_scu.training.preflight import doubts, out_of_proportion, out_of_reach
from granite_scu.training.prepared_run import PreparedRun, validations

OF_MEASURED, OF_PRINTED = 0.3, 0.2
"""Share that a training step is assumed to reach of the rate of matrix products: of the rate measured on this machine,
and of the one that the vendor prints, of which the presets expect a fifth too."""

MAX_SHOWN = 256
"""Blocks of the first micro-batch that a plan makes."""

OF_FORWARD = 0.5
"""Share of a training step that a forward pass alone is: ``model.flops`` has 2 operations of 4 a frozen weight."""


def describe(run: PreparedRun, here: bool = True) -> dict[str, Any]:
    """The facts of a plan, and a look at its first batch.

    Args:
        run: what is planned.
        here: whether the device is in this machine.
    """
    shown = min(run.request.data.batch_size, MAX_SHOWN)
    with errors_in_one_line():
        batch = next(iter(run.data.with_batch_size(shown).in_this_process().train_dataloader()))
    (blocks, length), supervised = batch["input_ids"].shape, (batch["labels"] != IGNORED).sum()
    return facts(run, here) | {"first_batch": f"{blocks} x {length} tokens, of which {supervised:,} are learned"}


def facts(run: PreparedRun, here: bool = True) -> dict[str, Any]:
    """What a run does and costs, as JSON has it.

    Memory, in GiB: what ``model.memory`` finds. Time, in seconds of training, validation and the scores at the end: on
    a CPU, of what ``model.step_time`` measures; on a GPU, the operations of ``model.flops`` at a share of the rate that
    matrix products have; null for a card that is not here and whose rate is not known. The questions at the end have
    a limit, in seconds.

    Args:
        run: what is planned.
        here: whether the device is in this machine.
    """
    request, length, machine, size = run.request, run.length, run.machine, run.size
    blocks = length.steps * length.tokens_per_step / request.data.block_size
    passes = None if request.data.stream else round(blocks / len(run.data.train), 2)
    seconds = _seconds(run, here)
    return {
        "model": request.base.name,
        "parameters": f"{size.frozen:,} frozen parameters, {size.trained:,} trained in {len(size.adapted)} adapters"
        f"{_share_adapted(run)}",
        "data": run.data.summary(),
        "device": machine.device.name,
        "device_is_here": here,
        "hardware_preset": request.hardware,
        "accelerator": machine.accelerator,
        "processes": machine.world_size,
        "precision": machine.precision,
        "compiled": bool(machine.compiled),
        "kernels": machine.kernels,
        "quantize_4bit": request.base.quantize_4bit,
        "gradient_checkpointing": bool(request.base.gradient_checkpointing),
        "first_step": run.resume.step if run.resume else 0,
        "steps": length.steps,
        "tokens_per_step": length.tokens_per_step,
        "tokens": length.steps * length.tokens_per_step,
        "passes": passes,
        "learned_tokens": None if passes is None else round(passes * run.data.train.n_supervised),
        "n_tokens": length.n_tokens,
        "eval_steps": run.intervals.validation,
        "save_steps": run.intervals.checkpoint,
        "controller": request.control.controller,
        "control_every": request.control.every,
        "max_drift": request.drift.max_drift,
        "general_data": request.drift.general_files,
        "target_s": "auto: moved at every tick" if run.controller.needs_slopes else run.setpoint,
        "s_ceiling_estimate": None if run.s_ceiling is None else float(f"{run.s_ceiling:.3g}"),
        **({"target_s_advice": "; ".join(warnings)} if (warnings := out_of_reach(run)) else {}),
        "chosen": run.chosen,
        "advice": [*out_of_proportion(run.request, length.steps, passes), *doubts(run)],
        **_memory(request, machine),
        "time_s_estimate": None if seconds is None else round(seconds),
        "questions_s_at_most": _of_questions(run),
        "output_dir": str(run.folder.path),
    }


def _share_adapted(run: PreparedRun) -> str:
    """What part of the model is adapted, where that is not every linear layer."""
    size, targets = run.size, run.request.lora.targets
    if targets is None or run.start:
        return ""
    some = f"{', '.join(listed(targets))}: {len(size.adapted)} of {size.adaptable} linear layers"
    return f" ({some}, {per_cent(size.trained / size.frozen)} as many parameters as the model)"


def _seconds(run: PreparedRun, here: bool) -> float | None:
    """Of what is left of training and its validations, and of the scores of base and adapter on the test text."""
    machine, length = run.machine, run.length
    done = run.resume.step if run.resume else 0
    learned = (length.steps - done) * length.tokens_per_step
    blocks = validations(length.steps, done, run.intervals.validation) * run.validation_blocks
    validated = (blocks + run.scored_blocks) * run.request.data.block_size
    if (pace := _pace(run, here)) is None:
        return None
    return (learned * pace.step + validated * pace.forward) / machine.world_size


def _of_questions(run: PreparedRun) -> int:
    """Seconds that the general questions at the end, and those of held-out chats, take at most; 0 where none is."""
    asked = run.request.run.samples and not run.machine.sharded
    return round(MAX_SECONDS * (2 if run.data.chats else 1)) if asked else 0


def _pace(run: PreparedRun, here: bool) -> step_time.Pace | None:
    """Seconds that a token takes on a device: of a step taken here on a CPU, else by the rate of its products."""
    machine, request = run.machine, run.request
    setting = memory_budget.setting_of(request, machine)
    config = loading.known_config(request.base.name)
    allowed = machine.memory_limit(request.run.memory_fraction)
    if here and machine.accelerator == "cpu" and memory.predict(config, setting).total <= allowed:
        return step_time.on_cpu(config, setting, [machine.device.name, torch.get_num_threads()])
    if here:
        dtype = WEIGHT_DTYPES[machine.precision]
        rate = OF_MEASURED * hardware.matmul_tflops(machine.device.kind, dtype, tf32=machine.tf32) * 1e12
    elif peak := printed_peak(machine.device, machine.precision, machine.tf32):
        rate = OF_PRINTED * peak.flops
    else:
        return None
    step = run.size.flops_per_token / rate
    return step_time.Pace(step, OF_FORWARD * step)


def _memory(request: Request, machine: Machine) -> dict[str, Any]:
    """What the run takes of the device's memory, what it may take, and what to change where that is less; GiB."""
    footprint = memory_budget.predict(request, machine)
    allowed = machine.memory_limit(request.run.memory_fraction)
    fits = footprint.total <= allowed
    return {
        "batch_size": request.data.batch_size,
        "auto_batch_size": request.run.auto_batch_size,
        "gradient_accumulation_steps": request.trainer["accumulate_grad_batches"],
        "batch": f"{request.data.batch_size} x {request.data.block_size} tokens, accumulated "
        f"{request.trainer['accumulate_grad_batches']} times",
        "memory_gib_estimate": round(footprint.total / hardware.GIB, 3),
        "memory_parts": memory_budget.describe(footprint),
        "memory_gib_allowed": round(allowed / hardware.GIB, 3),
        "memory_fits": fits,
        **({} if fits else {"memory_advice": memory_budget.advice(request, machine)}),
    }
