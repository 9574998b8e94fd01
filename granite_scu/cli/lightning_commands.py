"""The commands ``fit``, ``validate`` and ``test``: YAML files and dotted keys, through LightningCLI."""

import argparse

from granite_scu.cli import config_layers, early_refusals, guard, script_flags
from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.setting_names import as_dotted_keys
from granite_scu.config.flags import COMMONEST, SECTIONS

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


OF_SCORING = ("base.name", "data.path", "run.output_dir", "data.batch_size", "data.block_size", "base.quantize_4bit")
"""Of the commonest keys those that say something to the commands which only score."""


def main(arguments: list[str], name: str) -> int:
    """One of the commands; returns the exit code."""
    command = name.split()[-1]
    if "--help" in arguments or "-h" in arguments:
        print(build_parser(name).format_help(), end="")
        return 0
    if "--help-all" in arguments:
        print(build_parser(name).format_help())  # LightningCLI, which lists every key, knows neither preset nor names
    asked = ["--help" if argument == "--help-all" else argument for argument in arguments]
    return guard.guarded(lambda: _run([command, *asked]), "--debug" in arguments, wording=as_dotted_keys)


def _run(arguments: list[str]) -> int:
    if "--help" not in arguments:
        early_refusals.refuse(config_layers.put_first(arguments))
    from granite_scu.cli import train  # late: Lightning takes seconds

    return train.main(arguments)


def build_parser(name: str) -> Parser:
    """A parser that is there for its help: LightningCLI's own takes seconds, and lists all of Lightning's Trainer."""
    command = name.split()[-1]
    examples = [f"{name} {example}" for example in EXAMPLES[command]]
    parser = Parser(prog=name, usage="%(prog)s --config YAML [--group.key value]", description=ABOUT[command],
                    examples=examples, full_help=str, argument_default=argparse.SUPPRESS)  # fmt: skip
    first = parser.add_argument_group("where settings come from")
    first.add_argument("--config", metavar="YAML", help="a file, or the name of one that comes along; several are "
                       "layered")  # fmt: skip
    first.add_argument("--hardware", metavar="CARD", help="preset for a card; auto chooses the one for this machine")
    first.add_argument("--print_config", action="store_true", help="print the resolved configuration, which can be "
                       "given as --config again")  # fmt: skip
    common = parser.add_argument_group("commonest keys")
    for flag in (flag for section in SECTIONS.values() for flag in section if flag.name in COMMONEST):
        if command == "fit" or flag.key in OF_SCORING:
            given = script_flags.argument(flag)
            if flag.kind is bool:  # LightningCLI has no --no- form
                given |= {"action": "store", "metavar": "true|false"}
            common.add_argument(f"--{flag.key}", **given | {"help": as_dotted_keys(given["help"])})
    parser.add_debug()
    return parser
