"""The commands ``fit``, ``validate`` and ``test``: YAML files and dotted keys, through LightningCLI."""

from granite_scu.cli import guard, script_flags, validate
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.flags import COMMONEST

ABOUT = {
    "fit": "Fine-tune a model as YAML files and dotted keys say. Of defaults, preset, files and keys the last wins.",
    "validate": "Score the adapter in the run folder on the validation split, in bits per token.",
    "test": "Score the adapter in the run folder on the test split, in bits per token.",
}
EXAMPLES = {
    "fit": ("--config granite_4.0_h_1b --data.path my_texts/", "--config mine.yaml --config qlora --hardware gpu_4090",
            "--config mine.yaml --print_config"),
    "validate": ("--config runs/mine/config.yaml", "--config runs/mine/config.yaml --data.batch_size 4",
                 "--config runs/mine/config.yaml --trainer.accelerator cpu"),
    "test": ("--config runs/mine/config.yaml", "--config runs/mine/config.yaml --data.batch_size 4",
             "--config runs/mine/config.yaml --trainer.accelerator cpu"),
}  # fmt: skip


OF_SCORING = ("--model", "--data-dir", "--output-dir", "--batch-size", "--block-size", "--4bit-quantization")
"""Of the commonest settings those that say something to the commands which only score."""


def main(arguments: list[str], name: str) -> int:
    """One of the commands; returns the exit code."""
    return guard.guarded(lambda: _run(arguments, name), "--debug" in arguments)


def build_parser(name: str) -> Parser:
    """The parser of one of the commands."""
    command = name.split()[-1]
    commonest = COMMONEST if command == "fit" else OF_SCORING
    examples = [f"{name} {example}" for example in EXAMPLES[command]]
    return script_flags.build_parser(name, ABOUT[command], examples, commonest=commonest, dotted=True)


def _run(arguments: list[str], name: str) -> int:
    command = name.split()[-1]
    layers, options = script_flags.translate(arguments, build_parser(name), dotted=True)
    prints = "print_config" in options
    with layers.named():
        validate.refuse(layers, writes=command == "fit", opens=not prints)
        from granite_scu.cli import train  # late: Lightning takes seconds

        return train.run(layers, command, prints)
