"""``granite-scu fit|validate|test --config FILE.yaml``: one configuration for every way in.

LightningCLI parses it (defaults < hardware preset < YAML files, layered < flags); ``cli.train`` carries it out. The
flags of ``granite-scu train`` arrive here too, translated by ``cli.script_flags``.
"""

import difflib
import logging
import sys

import jsonargparse
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from granite_scu.cli import config_layers, early_refusals
from granite_scu.config import settings as config
from granite_scu.config.errors import UserError
from granite_scu.config.flags import HINTS
from granite_scu.config.request import Request, add_settings
from granite_scu.control import CONTROLLERS

COMMANDS = ("fit", "validate", "test")

ABOUT = {
    "prog": "granite-scu",
    "description": "Fine-tune a Granite model while a controller holds S at its target.",
}


class GraniteCLI(LightningCLI):
    """Parses a command into ``request``; builds nothing."""

    def __init__(self, arguments: list[str]) -> None:
        arguments, self.preset = config_layers.take_preset(arguments)
        self.given = config_layers.given(arguments)
        strict = {"exit_on_error": False, "allow_abbrev": False, "dump_header": None}
        # Each command's parser takes a tenth of a second to build; the others are for a call without a command.
        self.commands = tuple(arguments[:1]) if arguments and arguments[0] in COMMANDS else COMMANDS
        super().__init__(
            save_config_callback=None,
            seed_everything_default=config.SEED,
            parser_kwargs={**strict, **ABOUT, **{name: dict(strict) for name in self.commands}},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=arguments,
        )

    def subcommands(self) -> dict[str, set[str]]:
        """The commands. Lightning's own arguments of these are all ours to set."""
        ours = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
        return {name: ours | {"ckpt_path", "verbose", "weights_only"} for name in self.commands}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The dataclasses of ``config``, that of the Trainer's settings among them."""
        add_settings(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        """Lightning's, and a check of the seed, which it would use at once."""
        super().parse_arguments(parser, args)
        early_refusals.check_seed(self.config[self.config["subcommand"]]["seed_everything"])

    def instantiate_classes(self) -> None:
        """Only the dataclasses: the model and the trainer depend on the data, which is read later."""
        parser, given = self._parser(self.subcommand), self.config[self.subcommand]
        self.request = Request.from_parsed(parser, given, self.preset, self.given)

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing: the caller runs the request."""


def parse(arguments: list[str]) -> GraniteCLI:
    """Parse a command line of the CLI.

    Raises:
        UserError: anything wrong with it, in one line.
    """
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns when both are there
    try:
        config_layers.check_files(arguments)
        return GraniteCLI(arguments)
    except jsonargparse.ArgumentError as error:
        raise UserError(_in_one_line(str(error))) from error
    except (TypeError, UnicodeDecodeError) as error:  # what jsonargparse lets through of a group's own file
        raise UserError(
            f"a file given for a group, as --data FILE, is no YAML in UTF-8, or no mapping ({error})"
        ) from error
    finally:
        sys.argv = argv


def _in_one_line(message: str) -> str:
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())[:400]
    if message.startswith("unrecognized arguments"):
        names = [f"--{key}" for key in HINTS]
        words = (word.partition("=")[0] for word in message.split())
        meant = [close[0] for word in words if (close := difflib.get_close_matches(word, names, 1, 0.8))]
        if meant:
            return f"{line}; did you mean {' '.join(meant)}?"
    known = f"; there are {', '.join(CONTROLLERS)}" if '"control.controller"' in message else ""
    return f"{line}{known}; see --help-all for every key" if line else "wrong arguments; see --help-all"
