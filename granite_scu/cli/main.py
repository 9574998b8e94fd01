"""The command ``granite-scu``, also ``python -m granite_scu``: training, and what comes before and after."""

import argparse
import sys
from importlib import import_module

from granite_scu.cli import guard
from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.command_table import ASIDE
from granite_scu.cli.script_flags import without_local_rank


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = without_local_rank(sys.argv[1:] if argv is None else list(argv))
    if arguments[:1] and arguments[0] in ASIDE:
        return guard.guarded(lambda: _run(*arguments), "--debug" in arguments, how_to_continue="nothing was written")
    from granite_scu.cli import train  # late: it loads Lightning

    return train.main(arguments)


def _run(name: str, *arguments: str) -> int:
    module, meaning = ASIDE[name]
    parser = Parser(prog=f"granite-scu {name}", description=f"{meaning[0].upper()}{meaning[1:]}.")
    command = import_module(module)
    command.add_arguments(parser)
    parser.add_debug()
    options: argparse.Namespace = parser.parse_args(arguments)
    return command.run(options)


def entry_point() -> None:
    """The installed command."""
    sys.exit(main())
