"""The command ``granite-scu``, also ``python -m granite_scu``: training by ``cli``, and what comes before and after."""

import argparse
import sys
from importlib import import_module

from granite_scu.cli import guard
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.flags import without_local_rank

ASIDE = {
    "data": (
        "granite_scu.cli.inspect_data",
        "show what a run would train on: counts, lengths, samples with what is learned",
    ),
    "merge": ("granite_scu.export.merge", "write base model and adapter as one plain model"),
    "generate": ("granite_scu.evaluation.generate", "let base model and adapter go on with a text, side by side"),
    "runs": ("granite_scu.storage.run_list", "list the runs in a folder, and compare them"),
}
"""Commands that train nothing, so that they need none of the configuration: module and meaning of each.

The module has ``add_arguments(parser)`` and ``run(options) -> exit code``."""


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = without_local_rank(sys.argv[1:] if argv is None else list(argv))
    if arguments[:1] and arguments[0] in ASIDE:
        return guard.guarded(lambda: _run(*arguments), "--debug" in arguments, go_on="nothing was written")
    from granite_scu.cli import request_parser as cli  # late: it loads Lightning

    return cli.main(arguments)


def _run(name: str, *arguments: str) -> int:
    module, meaning = ASIDE[name]
    parser = Parser(prog=f"granite-scu {name}", description=f"{meaning[0].upper()}{meaning[1:]}.")
    command = import_module(module)
    command.add_arguments(parser)
    parser.add_debug()
    options: argparse.Namespace = parser.parse_args(arguments)
    return command.run(options)


def in_words() -> str:
    """What there is besides, for the help of what trains."""
    each = "; ".join(f"{name}: {meaning}" for name, (_, meaning) in ASIDE.items())
    return f"Besides training, each with its own --help. {each}."


def entry_point() -> None:
    """The installed command."""
    sys.exit(main())
