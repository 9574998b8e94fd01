"""``granite-scu --print-completion bash``: a script by which the shell completes commands, flags and files."""

import argparse
from collections.abc import Mapping

from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.command_table import BY_NAME
from granite_scu.config.errors import UserError
from granite_scu.hardware import presets

FLAG = "--print-completion"


def script(program: str, shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script for a shell.

    Args:
        program: whose command line is completed.
        shell: its name.
        commands: the parser of each command, by name.

    Raises:
        UserError: shtab is missing, or does not know the shell.
    """
    try:
        import shtab  # late: an extra
    except ImportError as error:
        raise UserError(f"{FLAG}: shtab is not installed; pip install 'granite-scu[completion]'") from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UserError(f"{FLAG} {shell}: there are {', '.join(shtab.SUPPORTED_SHELLS)}")
    root = Parser(prog=program)
    subparsers = root.add_subparsers()
    for name, parser in commands.items():
        for action in parser._actions:
            _complete(action, shtab.FILE)
        # One without a meaning would be left out.
        subparsers.add_parser(name, help=BY_NAME[name].meaning, parents=[parser], conflict_handler="resolve")
    return shtab.complete(root, shell)


def _complete(action: argparse.Action, by_file: Mapping[str, str]) -> None:
    """Offer an argument's choices, and files where it has none and takes a value. The help may not show it."""
    if action.help is argparse.SUPPRESS:
        action.help = ""
    if "--hardware" in action.option_strings:
        action.choices = (presets.AUTO, *presets.PRESETS)
    elif action.choices is None and action.nargs != 0:
        action.complete = by_file  # type: ignore[attr-defined]
