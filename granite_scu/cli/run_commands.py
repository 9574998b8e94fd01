"""The commands that take settings: ``train``, ``plan`` and ``check`` by flags, the others by dotted keys."""

from granite_scu.cli import exit_codes, script_flags, validate
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import UserError
from granite_scu.config.flags import COMMONEST, OF_SCORING

ABOUT = {
    "train": "Fine-tune IBM Granite with LoRA; on request a feedback controller holds drift or the adapter's size.",
    "plan": "Say what a run would do, how long it would take and in how much memory. Nothing is trained or written.",
    "check": "Say what a run needs and what this machine lacks for it. Exit code 0 where it can start, 1 where not.",
    "fit": "Fine-tune a model as YAML files and dotted keys say. Of defaults, preset, files and keys the last wins.",
    "validate": "Score the adapter in the run folder on the validation split, in bits per token.",
    "test": "Score the adapter in the run folder on the test split, in bits per token.",
}
EXAMPLES = {
    "train": (
        "--test-run",
        "--data-dir my_texts/ --output-dir runs/mine",
        "--data-dir chats.jsonl --hardware gpu_4090 --num-epochs 3 --output-dir runs/chats",
    ),
    "plan": (
        "--data-dir my_texts/",
        "--data-dir chats.jsonl --hardware gpu_4090 --num-epochs 3",
        "--test-run --json",
    ),
    "check": (
        "",
        "--hardware gpu_4090 --4bit-quantization",
        "--model ibm-granite/granite-4.0-h-tiny --json",
    ),
    "fit": ("--config granite_4.0_h_1b --data.path my_texts/", "--config mine.yaml --config qlora --hardware gpu_4090",
            "--config mine.yaml --print_config"),
    "validate": ("--config runs/mine/config.yaml", "--config runs/mine/config.yaml --data.batch_size 4",
                 "--config runs/mine/config.yaml --trainer.accelerator cpu"),
    "test": ("--config runs/mine/config.yaml", "--config runs/mine/config.yaml --data.batch_size 4",
             "--config runs/mine/config.yaml --trainer.accelerator cpu"),
}  # fmt: skip
DOTTED = ("fit", "validate", "test")
"""Commands whose help shows dotted keys, and which LightningCLI parses."""

_FLAG = {"plan": ["--dry-run"], "check": ["--check-requirements"]}


def build_parser(name: str) -> Parser:
    """The parser of one of the commands."""
    program = f"granite-scu {name}"
    examples = [f"{program} {example}".rstrip() for example in EXAMPLES[name]]
    commonest = OF_SCORING if name in ("validate", "test") else COMMONEST
    return script_flags.build_parser(program, ABOUT[name], examples, commonest=commonest, dotted=name in DOTTED)


def run(command: str, arguments: list[str]) -> int:
    """Carry one of the commands out; returns the exit code."""
    given = [*arguments, *_FLAG.get(command, [])]
    layers, options = script_flags.translate(given, build_parser(command), command in DOTTED)
    asked = vars(options)
    questions = [name for name in ("print_config", "dry_run", "check_requirements") if name in asked]
    if len(questions) > 1:
        flag, *others = (f"--{name.replace('_', '-')}" for name in questions)
        raise UserError(f"{flag}: asked together with {' and '.join(others)}, which is another question; ask one "
                        "(plan asks --dry-run, check --check-requirements)")  # fmt: skip
    if "json" in asked and not {"check_requirements", "dry_run"} & asked.keys():
        raise UserError("--json: a run prints no JSON; leave it out, or ask by plan or check")
    with layers.named():
        if "check_requirements" not in asked:
            writes = command not in ("validate", "test") and "dry_run" not in asked
            validate.refuse(layers, writes, opens="print_config" not in asked)
        with exit_codes.importing():
            from granite_scu.cli import train  # late: torch takes seconds

        if "check_requirements" in asked:
            return train.check_requirements(layers, as_json="json" in asked)
        if "dry_run" in asked:
            return train.dry_run(layers, as_json="json" in asked)
        return train.run(layers, command if command in DOTTED else "fit", prints="print_config" in asked)
