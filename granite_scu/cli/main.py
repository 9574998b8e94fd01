"""The command ``granite-scu``, also ``python -m granite_scu``: a verb for everything that a user does."""

import argparse
import difflib
import os
import sys
from importlib import import_module

import granite_scu
from granite_scu.cli import completion, exit_codes
from granite_scu.cli.argument_parser import Parser, hyphenated, without_local_rank
from granite_scu.cli.command_table import BY_NAME, COMMANDS
from granite_scu.config import launcher
from granite_scu.config.errors import UserError
from granite_scu.config.own_python import NOT_FROM_HERE

PROGRAM = "granite-scu"
ABOUT = "Fine-tune IBM Granite with LoRA; on request a feedback controller holds drift or the adapter's size."
EXAMPLES = (
    f"{PROGRAM} train --test-run                                try it: two minutes on a CPU, nothing is downloaded",
    f"{PROGRAM} plan --data-dir my_texts/ --hardware gpu_4090   what a run would take",
    f"{PROGRAM} train --data-dir my_texts/ --output-dir runs/mine",
    f"{PROGRAM} report runs/mine",
)


ASKING = {"--dry-run", "--check-requirements", "--print-config", "--help", "-h", "--help-all"}
"""Flags with which a command writes nothing."""


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = without_local_rank(sys.argv[1:] if argv is None else list(argv))
    command = BY_NAME.get(arguments[0]) if arguments and ASKING.isdisjoint(arguments) else None
    how_to_continue = command.how_to_continue if command else exit_codes.NOTHING_WRITTEN
    return exit_codes.exit_code_of(lambda: _run(*arguments), "--debug" in arguments, how_to_continue)


def _run(name: str = "--help", *arguments: str) -> int:
    if name in ("--help", "-h", "--help-all", "help"):
        print(overview(), end="")
        return 0
    if name == "--version":
        print(f"{PROGRAM} {granite_scu.__version__}")
        return 0
    if name.startswith(completion.FLAG):
        shell = name.partition("=")[2] or next(iter(arguments), "")
        print(completion.script(PROGRAM, shell, {name: build_parser(name) for name in BY_NAME}))
        return 0
    if name not in BY_NAME:
        raise UserError(_unknown(name))
    launcher.ranks()  # wrong ones are refused here: Lightning reads them as it is imported, and would fail there
    module = import_module(BY_NAME[name].module)
    if hasattr(module, "build_parser"):
        return module.run(name, list(arguments))
    parser = build_parser(name)
    return module.run(parser.parse_intermixed_args([hyphenated(argument) for argument in arguments]))


def build_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    command, prog = BY_NAME[name], f"{PROGRAM} {name}"
    module = import_module(command.module)
    if hasattr(module, "build_parser"):
        return module.build_parser(name)
    meaning = f"{command.meaning[0].upper()}{command.meaning[1:]}. {getattr(module, 'ABOUT', '')}".rstrip()
    examples = [f"{prog} {example}".rstrip() for example in getattr(module, "EXAMPLES", ())]
    parser = Parser(prog=prog, description=meaning, examples=examples, commonest=getattr(module, "COMMONEST", ()))
    module.add_arguments(parser)
    parser.add_debug(parser.add_argument_group("where something is wrong"))
    return parser


def overview() -> str:
    """All commands."""
    lines = [f"usage: {PROGRAM} COMMAND ...", "", ABOUT]
    for group, commands in COMMANDS.items():
        lines += ["", f"{group}:", *(f"  {name:10}{command.meaning}" for name, command in commands.items())]
    lines += ["", "examples:", *(f"  {example}" for example in EXAMPLES)]
    lines += ["", f"{PROGRAM} COMMAND --help has the commonest flags of each, --help-all every flag."]
    return "\n".join(lines) + "\n"


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"{name}: comes after a command, as in: {PROGRAM} train {name} ...; {PROGRAM} --help lists the commands"
    close = difflib.get_close_matches(name, BY_NAME, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{name}: no such command; {hint}there are {', '.join(BY_NAME)}"


def entry_point() -> None:
    """The installed command."""
    os.environ |= NOT_FROM_HERE
    sys.exit(main())
