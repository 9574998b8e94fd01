"""The plan of a run in words: the lines that a run begins with, and the table of a dry run."""

from typing import Any

from granite_scu.config.settings import SHORT_PRECISIONS
from granite_scu.control.units import counted, duration, per_cent
from granite_scu.hardware.presets import CARDS


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
    rows = {
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
    kind = "conversation" if data["conversations"] else "document"
    learned = "streamed, and counted as it is read"
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


def _precision(facts: dict[str, Any]) -> str:
    words = (
        SHORT_PRECISIONS.get(facts["precision"], facts["precision"]),
        "base model in 4 bits" if facts["quantize_4bit"] else "",
        "compiled layers" if facts["compiled"] else "",
        "activations computed again in the backward pass" if facts["gradient_checkpointing"] else "",
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
    passes = "" if facts["passes"] is None else f", {_three_digits(facts['passes'])} passes over the data"
    learned = "" if facts["learned_tokens"] is None else f", {facts['learned_tokens']:,} of them learned"
    return f"{steps}: {facts['tokens']:,} tokens{learned}{passes}"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _memory(facts: dict[str, Any]) -> str:
    taken, allowed = facts["memory_gib_estimate"], facts["memory_gib_allowed"]
    free = " free" if facts["accelerator"] == "cpu" else ""
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
    if isinstance(target, str):
        return f"{sets}, so that {size} reaches a value, S*, that held-out text chooses"
    return f"{sets}, so that {size} reaches S* = {per_cent(target)}"
