"""``python -m granite_scu fit|validate|test|identify --config FILE.yaml``: one configuration for every way in.

jsonargparse reads it (defaults < hardware preset < YAML files, layered < flags), with the keys that LightningCLI has
too; ``cli.train`` carries it out. The flags of ``scripts/train_granite_cuda.py`` arrive here too, translated by
``cli.script_flags``.
"""

from dataclasses import dataclass
from functools import cache

import lightning as L
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser

from granite_scu.cli import command_table, config_layers
from granite_scu.config import flags
from granite_scu.config import settings as config
from granite_scu.config.request import Request, add_settings, check_values
from granite_scu.control import CONTROLLERS
from granite_scu.errors import UserError

COMMANDS = {
    "fit": "Train, score the adapter on test text, and write the run folder.",
    "validate": "Score the adapter of a run folder, and the base model, on validation text.",
    "test": "Score the adapter of a run folder, and the base model, on test text.",
    "identify": "Step lambda, fit a model of the plant to what S does, propose gains for the law, and try them.",
}
"""The commands, and what each does."""

STRICT = {"exit_on_error": False, "allow_abbrev": False, "dump_header": [f"lightning.pytorch=={L.__version__}"]}


@dataclass(frozen=True)
class Command:
    """A command line that was understood.

    Attributes:
        subcommand: one of ``COMMANDS``.
        request: what describes the run.
        step_test: of ``identify``; None of the others.
    """

    subcommand: str
    request: Request
    step_test: config.IdentifyConfig | None


@cache
def command_parsers() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The parser of all commands, and that of each. Made once: reading the Trainer's signature takes long."""
    about = "Fine-tune a Granite model while a controller holds S at its target."
    parser = ArgumentParser(prog="granite-scu", description=about, epilog=command_table.describe(), **STRICT)
    _add_config(parser)
    subcommands, each = parser.add_subcommands(), {}
    for name, meaning in COMMANDS.items():
        each[name] = command = ArgumentParser(description=meaning, **STRICT)
        _add_config(command)
        command.add_argument(
            "--seed_everything", type=bool | int, default=config.SEED, help="seed of everything random; true draws one"
        )
        add_settings(command)
        if name == "identify":
            command.add_class_arguments(config.IdentifyConfig, "step_test")
        subcommands.add_subcommand(name, command, help=meaning)
    return parser, each


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="configuration file; several are layered")


def parse(arguments: list[str]) -> Command:
    """Parse a command line of the CLI.

    Raises:
        UserError: anything wrong with it, in one line.
    """
    try:
        config_layers.check_files(arguments)
        arguments, preset = config_layers.take_preset(arguments)
        parser, each = command_parsers()
        parsed = parser.parse_args(arguments)
        name, given = parsed["subcommand"], parsed[parsed["subcommand"]]
        given["seed_everything"] = _seeded(given["seed_everything"])
        if "step_test" in given:
            check_values(given, {"step_test": config.IdentifyConfig})
        request = Request.from_parsed(each[name], given, preset)
        return Command(name, request, each[name].instantiate_classes(given).get("step_test"))
    except ArgumentError as error:
        raise UserError(_in_one_line(str(error))) from error
    except (TypeError, UnicodeDecodeError) as error:  # what jsonargparse lets through of a group's own file
        raise UserError(
            f"a file given for a group, as --data FILE, is no YAML in UTF-8, or no mapping ({error})"
        ) from error


def _seeded(seed: int | bool | None) -> int | bool:
    """The seed, which random numbers have from here on; true draws one, false seeds nothing."""
    if seed is None or (seed is not True and not 0 <= seed < 2**32):
        raise UserError(f"--seed {seed}: must be a whole number from 0 to {2**32 - 1}")
    return seed if seed is False else L.seed_everything(None if seed is True else seed, workers=True, verbose=False)


def _in_one_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if hint := _dotted(message):
        return f"{' '.join(lines)[:400]}; {hint}"
    known = f"; there are {', '.join(CONTROLLERS)}" if '"control.controller"' in message else ""
    return f"{' '.join(lines)[:400]}{known}; see --help for every key" if lines else "wrong arguments; see --help"


def _dotted(message: str) -> str:
    """What the script's flags in a refusal are called here; empty where there are none."""
    if not message.startswith("unrecognized arguments"):
        return ""
    keys = {flag.name: flag.key for section in flags.SECTIONS.values() for flag in section}
    given = [word.partition("=")[0].replace("_", "-") for word in message.split()]
    return ", ".join(f"{word} is --{keys[word]} here" for word in given if word in keys)
