"""The argument parser of all commands, and of the benchmarks."""

import argparse
import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from granite_scu.config.errors import UserError

WIDTH = 100
"""Columns of a description."""

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "share": "a share, such as 10% or 0.1",
    "path": "the name of a file or folder, and not empty",
}
"""Kinds of values, in words."""


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and reports a wrong flag in one line, through ``UserError``.

    Args:
        examples: command lines that the help shows before the flags.
        commonest: the flags that ``--help`` shows; empty for all.
    """

    def __init__(
        self,
        *,
        examples: Sequence[str] = (),
        commonest: Collection[str] = (),
        **settings: Any,
    ) -> None:
        if examples:
            lines = "\n".join(f"  {example}" for example in examples)
            description = textwrap.fill(settings.pop("description", ""), WIDTH)
            settings["description"] = f"{description}\n\nexamples:\n{lines}"
            settings["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, **settings})
        self._negative_number_matcher = re.compile(r"-\.?\d")  # a value too where it has a unit, as -1%
        self._commonest = {"--help", "--help-all", *commonest} if commonest else set()
        shown = "show every flag" if commonest else argparse.SUPPRESS
        self.add_argument("--help-all", action=_Show, text=self.format_help, help=shown)

    def print_help(self, file: Any = None) -> None:
        """Print the help. argparse itself says nothing where it cannot be written."""
        if not self._commonest:
            print(self.format_help(), end="", file=file)
            return
        hidden = {action: action.help for action in self._actions if self._commonest.isdisjoint(action.option_strings)}
        named = [action for action in hidden if not action.option_strings]
        words = (f"[{action.metavar} ...]" if action.nargs == "*" else str(action.metavar) for action in named)
        usage, self.usage = self.usage, self.usage or " ".join(("%(prog)s", *words, "[flags]"))
        try:
            for action in hidden.keys() - set(named):
                action.help = argparse.SUPPRESS
            print(self.format_help(), end="", file=file)
        finally:
            self.usage = usage
            for action, text in hidden.items():
                action.help = text

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see --help")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            kind = KINDS.get(getattr(action.type, "__name__", ""))
            raise (UserError(f"{_name(action)} {arg_string or repr('')}: must be {kind}") if kind else error) from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UserError(f"{_name(action)} {value}: must be one of {', '.join(map(str, action.choices))}")

    def add_debug(self, group: argparse._ArgumentGroup | None = None) -> None:
        """The flag that error messages speak of; ``exit_codes.exit_code_of`` is told whether it was given."""
        (group or self).add_argument("--debug", action="store_true", help="show the traceback of an error")


def _name(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


class _Show(argparse.Action):
    """Prints a text that is made when it is asked for, and ends."""

    def __init__(self, *, text: Callable[[], str], **settings: Any) -> None:
        super().__init__(**{**settings, "nargs": 0, "default": argparse.SUPPRESS})
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(self.text(), end="")
        parser.exit()


def path(text: str) -> Path:
    """The type of an argument that names a file or folder; an empty one would be the folder that the command is in."""
    if not text:
        raise ValueError
    return Path(text).expanduser()


def without_local_rank(argv: list[str]) -> list[str]:
    """Without the ``--local-rank=N`` that ``python -m torch.distributed.launch`` adds: LOCAL_RANK says it as well."""
    return [argument for argument in argv if not argument.startswith(("--local-rank=", "--local_rank="))]


def hyphenated(argument: str) -> str:
    """``--batch_size`` as ``--batch-size``; values and dotted flags stay as they are."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") and "." not in name else argument
