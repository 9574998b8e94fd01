"""``granite-scu fit|validate|test`` as commands of LightningCLI, over the same dataclasses as ``train``."""

import logging
import sys

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from granite_scu.cli.config_layers import Layers
from granite_scu.config import settings as config
from granite_scu.config.request import Request, add_settings, nested


class GraniteCLI(LightningCLI):
    """Makes ``request`` of what a command line asks for; builds nothing.

    Args:
        layers: what is asked for, its preset among the layers.
        command: fit, validate or test.
    """

    def __init__(self, layers: Layers, command: str) -> None:
        self.layers, self.command = layers, command
        strict = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            save_config_callback=None,
            seed_everything_default=config.SEED,
            parser_kwargs={**strict, command: strict},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args={"subcommand": command, command: nested(layers.values)},
        )

    def subcommands(self) -> dict[str, set[str]]:
        """The command. Lightning's own arguments of it are all ours to set."""
        ours = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
        return {self.command: ours | {"ckpt_path", "verbose", "weights_only"}}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The dataclasses of ``config``, that of the Trainer's settings among them."""
        add_settings(parser)

    def instantiate_classes(self) -> None:
        """Only the dataclasses: the model and the trainer depend on the data, which is read later."""
        parsed = self.config[self.subcommand]
        parsed.pop("config")  # LightningCLI's own; the files are among the layers
        self.request = Request.from_parsed(parsed, self.layers.preset, self.layers.given)

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing: the caller runs the request."""


def parse(layers: Layers, command: str = "fit") -> GraniteCLI:
    """What LightningCLI makes of a command line, which ``layers.request`` has been made of already."""
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns when both are there
    try:
        return GraniteCLI(layers, command)
    finally:
        sys.argv = argv
