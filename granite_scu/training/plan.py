"""The plan of a run: what it trains on what, and what that will cost; as facts, and as text. Estimates are marked as
such."""

from typing import Any

import torch

from granite_scu.config.errors import attempt
from granite_scu.config.request import Request
from granite_scu.config.settings import ADVISED_DRIFT, DEFAULT_EVERY, IGNORED, MIN_DRIFT_TICKS, SHORT_PRECISIONS, listed
from granite_scu.control.units import counted, duration, per_cent
from granite_scu.data.workers import errors_in_one_line
from granite_scu.hardware import detection, peaks
from granite_scu.hardware.machine import Machine
from granite_scu.hardware.peaks import printed_peak
from granite_scu.hardware.presets import CARDS
from granite_scu.model import loading, memory, step_time
from granite_scu.model.drift import anchor_tokens, steering_tokens
from granite_scu.model.loading import WEIGHT_DTYPES
from granite_scu.training import memory_budget
from granite_scu.training.callbacks.samples import MAX_SECONDS
from granite_scu.training.early_checks import check_folder, check_loggers
from granite_scu.training.preflight import out_of_proportion, out_of_reach, run_warnings
from granite_scu.training.prepared_run import OF_PRINTED, PreparedRun, validations

OF_MEASURED = 0.3
"""Share that a training step is assumed to reach of the rate of matrix products that is measured on this machine."""

MAX_SHOWN = 256
"""Blocks of the first micro-batch that a plan makes."""

MANY_EPOCHS = 20
"""Epochs that are looked at, where they differ, for how many blocks one has in the mean."""

OF_FORWARD = 0.5
"""Share of a training step that a forward pass alone is: ``model.flops`` has 2 operations of 4 a frozen weight."""


def look(run: PreparedRun, here: bool = True) -> dict[str, Any]:
    """The facts of a plan, and a look at its first batch.

    Args:
        run: what is planned.
        here: whether the device is in this machine.
    """
    shown = min(run.request.data.batch_size, MAX_SHOWN)
    data = run.data.served(batch_size=shown, num_workers=0)  # loader processes take longer than all the rest
    with errors_in_one_line():
        batch = next(iter(data.train_dataloader()))
    (blocks, length), supervised = batch["input_ids"].shape, (batch["labels"] != IGNORED).sum()
    found = facts(run, here) | {"first_batch": f"{blocks} x {length} tokens, of which {supervised:,} are learned"}
    asked = run.request.run  # a plan writes nothing, and what is in the way of a run is no fault of it
    checks = (check_folder, run.folder, run.request), (check_loggers, asked.loggers, asked.logger_offline)
    in_the_way = [f"the run would be refused: {why}" for check in checks if (why := attempt(*check)[1])]
    return found | {"advice": [*found["advice"], *in_the_way]}


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
    passes, learned = (None, None) if request.data.stream else _reading(run, blocks)
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
        "gradient_checkpointing": request.base.gradient_checkpointing or False,
        "first_step": run.resume.step if run.resume else 0,
        "steps": length.steps,
        "tokens_per_step": length.tokens_per_step,
        "tokens": length.steps * length.tokens_per_step,
        "passes": None if passes is None else float(f"{passes:.3g}"),
        "learned_tokens": learned,
        "n_tokens": length.n_tokens,
        "eval_steps": run.intervals.validation,
        "save_steps": run.intervals.checkpoint,
        "controller": request.control.controller,
        "control_every": request.control.every,
        "max_drift": request.drift.max_drift,
        "general_data": request.drift.general_files,
        "target_s": run.setpoint,
        "s_ceiling_estimate": None if run.s_ceiling is None else float(f"{run.s_ceiling:.3g}"),
        **({"target_s_advice": "; ".join(warnings)} if (warnings := out_of_reach(run)) else {}),
        "chosen": run.chosen,
        "advice": [*out_of_proportion(request, length.steps, passes, seconds), *run_warnings(run)],
        **_memory_facts(request, machine),
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


def _reading(run: PreparedRun, blocks: float) -> tuple[float, int]:
    """How often so many blocks read the data, and the tokens that are learned in them."""
    first, asked = run.data.train, run.request.data.num_epochs
    passes = blocks / run.data.epochs.mean(asked or min(MANY_EPOCHS, blocks / len(first)))
    return passes, round(blocks * first.n_supervised / len(first))


def _seconds(run: PreparedRun, here: bool) -> float | None:
    """Of what is left of training, of what its controller reads, of validations, and of the scores of base and adapter
    on the test text."""
    machine, length = run.machine, run.length
    done = run.resume.step if run.resume else 0
    block, every = run.request.data.block_size, run.request.control.every or DEFAULT_EVERY
    steps, ticks = length.steps - done, (length.steps - done) // every
    learned = steps * length.tokens_per_step
    blocks = validations(length.steps, done, run.intervals.validation) * run.validation_blocks
    read = (blocks + run.scored_blocks) * block
    if run.request.drift.max_drift is not None:
        learned += steps * anchor_tokens(length.tokens_per_step, run.request.trainer.accumulate_grad_batches)
        read += ticks * steering_tokens(length.tokens_per_step * every)
    if (pace := _pace(run, here)) is None:
        return None
    return (learned * pace.step + read * pace.forward) / machine.world_size


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
        rate = OF_MEASURED * peaks.matmul_tflops(machine.device.kind, dtype, tf32=machine.tf32) * 1e12
    elif peak := printed_peak(machine.device, machine.precision, machine.tf32):
        rate = OF_PRINTED * peak.flops
    else:
        return None
    step = run.size.flops_per_token / rate
    return step_time.Pace(step, OF_FORWARD * step)


def _memory_facts(request: Request, machine: Machine) -> dict[str, Any]:
    """What the run takes of the device's memory, what it may take, and what to change where that is less; GiB."""
    footprint = memory_budget.predict(request, machine)
    allowed = machine.memory_limit(request.run.memory_fraction)
    fits = footprint.total <= allowed
    return {
        "batch_size": request.data.batch_size,
        "auto_batch_size": request.run.auto_batch_size,
        "gradient_accumulation_steps": request.trainer.accumulate_grad_batches,
        "batch": f"{request.data.batch_size} x {request.data.block_size} tokens, accumulated "
        f"{request.trainer.accumulate_grad_batches} times",
        "memory_gib_estimate": None if footprint.step is None and fits else round(footprint.total / detection.GIB, 3),
        "memory_parts": memory_budget.describe(footprint),
        "memory_gib_allowed": round(allowed / detection.GIB, 3),
        "memory_fits": fits,
        **({} if fits else {"memory_advice": memory_budget.advice(request, machine)}),
    }


def opening(facts: dict[str, Any], resume: str = "--resume-from-checkpoint last") -> list[str]:
    """What a run says of itself before it starts, at most twelve lines, and what is wrong with its settings.

    Args:
        facts: as ``plan.facts`` finds them.
        resume: the flag that continues the run.
    """
    rows = describe(facts) | {"Ctrl-C": f"saves, and the same command with {resume} continues"}
    width = max(map(len, rows)) + 2
    lines = (("chosen", facts["chosen"]), ("note", facts["advice"]))
    return [
        *(f"{name:<{width}}{text}" for name, text in rows.items()),
        *(f"{name}: {line}" for name, said in lines for line in said),
    ]


def describe(facts: dict[str, Any]) -> dict[str, str]:
    """What a person wants to know of a run first, by the name of each row."""
    return {
        "model": f"{facts['model']}: {facts['parameters']}",
        "data": _data(facts["data"]),
        "device": _device(facts),
        "precision": _precision(facts),
        "batch": _batch(facts),
        "length": _length(facts),
        "memory": _memory(facts),
        "time": _time(facts),
        "controller": _controller(facts),
        "folder": facts["output_dir"],
    }


def details(facts: dict[str, Any]) -> dict[str, str]:
    """What is worth knowing besides, of a dry run."""
    ceiling = facts["s_ceiling_estimate"]
    steered = facts["controller"] != "none" and facts.get("max_drift") is None
    largest = "" if ceiling is None else f"{per_cent(ceiling)}, by these learning rates and steps (estimate)"
    free = facts["data"]["conversations"] and facts.get("max_drift") is None
    longer = ", in a longer run" if facts["steps"] < MIN_DRIFT_TICKS else ""
    rows = {
        "forgetting": f"nothing holds it; --max-drift {ADVISED_DRIFT} does{longer}" if free else "",
        "memory is taken by": facts["memory_parts"].partition(": ")[2] + " (GiB)",
        "first batch": facts["first_batch"],
        "N": f"{facts['n_tokens']:,} tokens, over which S spreads the bits of the adapter" if steered else "",
        "largest S": largest if steered else "",
        "setpoint": facts.get("target_s_advice", ""),
        "chosen": "\n".join(facts["chosen"]),
        "note": "\n".join(facts["advice"]),
    }
    return {name: text for name, text in rows.items() if text}


def _data(data: dict[str, Any]) -> str:
    train, validation, test = (data[split] for split in ("train", "validation", "test"))
    kind, learned = data["kind"], "streamed, and counted as it is read"
    if not train.get("streamed"):
        learned = f"{counted(train['documents'], kind)}, {train['supervised_tokens']:,} tokens to train on"
    held_out = f"{counted(validation['documents'], kind)} to validate on, {test['documents']:,} to test on"
    if data["test_is_validation"]:
        held_out = f"{counted(validation['documents'], kind)} to validate and to test on, the same"
    elif not validation["documents"] and not test["documents"]:
        held_out = "nothing held out: no validation, no best adapter and no score on other text"
    return f"{data['path']}: {learned}; {held_out}"


def _device(facts: dict[str, Any]) -> str:
    name = f"{facts['device']} (CPU)" if facts["accelerator"] == "cpu" else facts["device"]
    several = f", {facts['processes']} processes" if facts["processes"] > 1 else ""
    preset, note = facts["hardware_preset"], ""
    if not facts["device_is_here"]:
        note = "; not in this machine: the plan is for such a card"
    elif facts["accelerator"] == "cpu" and preset in CARDS:
        note = f"; on the CPU, and not on the card that --hardware {preset} is for"
    return f"{name}{several}{note}"


RECOMPUTED = {
    False: "",
    "selective": "activations but products computed again in the backward pass",
    True: "activations computed again in the backward pass",
}
"""How a plan calls what is recomputed."""


def _precision(facts: dict[str, Any]) -> str:
    words = (
        SHORT_PRECISIONS.get(facts["precision"], facts["precision"]),
        "base model in 4 bits" if facts["quantize_4bit"] else "",
        "compiled layers" if facts["compiled"] else "",
        RECOMPUTED[facts["gradient_checkpointing"]],
    )
    return ", ".join(filter(None, words))


def _batch(facts: dict[str, Any]) -> str:
    shape = f"{counted(facts['batch_size'], 'block')} of {facts['data']['block_size']:,} tokens"
    accumulated = facts["gradient_accumulation_steps"]
    parts = [shape] + ([f"{accumulated} times, accumulated"] if accumulated > 1 else [])
    parts += [f"{facts['processes']} processes"] if facts["processes"] > 1 else []
    tried = "; tried out first, and made smaller where it does not fit" if facts["auto_batch_size"] else ""
    return f"{' x '.join(parts)} = {facts['tokens_per_step']:,} tokens a step{tried}"


def _length(facts: dict[str, Any]) -> str:
    steps = counted(facts["steps"], "step")
    if facts["first_step"]:
        steps = f"{steps}, of which {facts['first_step']:,} are done"
    n = facts["passes"]
    passes = "" if n is None else f", {n:{',.0f' if n >= 100 else '.3g'}} passes over the data"
    learned = "" if facts["learned_tokens"] is None else f", {facts['learned_tokens']:,} of them learned"
    return f"{steps}: {facts['tokens']:,} tokens{learned}{passes}"


def _memory(facts: dict[str, Any]) -> str:
    taken, allowed = facts["memory_gib_estimate"], facts["memory_gib_allowed"]
    free = " free" if facts["accelerator"] == "cpu" else ""
    if taken is None:
        return f"not predicted for this model; there are {_gib(allowed)} GiB{free}"
    amount = f"{_gib(taken)} of {_gib(allowed)} GiB{free}"
    if facts["memory_fits"]:
        return f"{amount}, fits (predicted)"
    return f"{amount}, does not fit (predicted); {facts['memory_advice']}"


def _gib(amount: float) -> str:
    return f"{amount:.1f}" if amount >= 1 else f"{amount:.2f}"


def _time(facts: dict[str, Any]) -> str:
    seconds = facts["time_s_estimate"]
    if seconds is None:
        return "not predicted: the speed of this card is not known"
    measured = "a step timed here" if facts["accelerator"] == "cpu" else "the speed of matrix products here"
    basis = f"from {measured}" if facts["device_is_here"] else "from the vendor's figures"
    questions = facts["questions_s_at_most"]
    then = f"; then questions, at most {duration(questions)}" if questions else ""
    first = "some minutes of compiling, then " if facts["compiled"] else ""
    if facts.get("max_drift") is not None and not (facts["general_data"] or facts["first_step"]):
        first = f"first the base model writes general text, unless an earlier run did, then {first}"
    return f"{first}about {duration(seconds)} of training and validation, a rough estimate {basis}{then}"


def _controller(facts: dict[str, Any]) -> str:
    name, target = facts["controller"], facts["target_s"]
    if name == "none":
        return "none: plain LoRA"
    sets = f"{name} sets lambda (how hard the adapter is held back) every {counted(facts['control_every'], 'step')}"
    if (budget := facts.get("max_drift")) is not None:
        text = ", ".join(facts["general_data"]) or "what the base model writes"
        return f"{sets}, so that the model drifts from its base by at most {per_cent(budget)} on general text: {text}"
    if target is None:
        return sets
    size = "S (the adapter's share of the bits of text and adapter)"
    return f"{sets}, so that {size} reaches S* = {per_cent(target)}"
