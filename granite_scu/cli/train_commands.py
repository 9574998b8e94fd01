"""The commands ``train``, ``plan`` and ``check``, which take the same flags; and ``scripts/train_granite_cuda.py``."""

from granite_scu.cli import guard, script_flags, validate
from granite_scu.cli.argument_parser import Parser

ABOUT = {
    "train": "Fine-tune IBM Granite with LoRA while a controller sets the strength of the regularisation, lambda.",
    "plan": "Say what a run would do, how long it would take and in how much memory. Nothing is trained or written.",
    "check": "Say what a run needs and what this machine lacks for it. Exit code 0 where it can start, 1 where not.",
}
EXAMPLES = {
    "train": (
        "granite-scu train --test-run",
        "granite-scu train --data-dir my_texts/ --output-dir runs/mine",
        "granite-scu train --data-dir chats.jsonl --hardware gpu_4090 --num-epochs 3 --output-dir runs/chats",
    ),
    "plan": (
        "granite-scu plan --data-dir my_texts/",
        "granite-scu plan --data-dir chats.jsonl --hardware gpu_4090 --num-epochs 3",
        "granite-scu plan --test-run --json",
    ),
    "check": (
        "granite-scu check",
        "granite-scu check --hardware gpu_4090 --4bit-quantization",
        "granite-scu check --model ibm-granite/granite-4.0-h-tiny --json",
    ),
}
_FLAG = {"train": [], "plan": ["--dry-run"], "check": ["--check-requirements"]}


def main(arguments: list[str], name: str = "granite-scu train") -> int:
    """One of the commands; returns the exit code."""
    writes = name.split()[-1] == "train" and not {"--dry-run", "--check-requirements"} & set(arguments)
    how = {} if writes else {"how_to_continue": guard.NOTHING_WRITTEN}
    return guard.guarded(lambda: _run(arguments, name), debug="--debug" in arguments, **how)


def build_parser(name: str) -> Parser:
    """The parser of one of the commands."""
    command = name.split()[-1]
    return script_flags.build_parser(name, ABOUT[command], EXAMPLES[command])


def _run(arguments: list[str], name: str) -> int:
    layers, options = script_flags.translate([*arguments, *_FLAG[name.split()[-1]]], build_parser(name))
    asked = vars(options)
    with layers.named():
        if "check_requirements" not in asked:
            validate.refuse(layers, opens="print_config" not in asked)
        with guard.importing():
            from granite_scu.cli import train  # late: torch takes seconds

        if "check_requirements" in asked:
            return train.check_requirements(layers, as_json="json" in asked)
        if "dry_run" in asked:
            return train.dry_run(layers, as_json="json" in asked)
        return train.run(layers, prints="print_config" in asked)
