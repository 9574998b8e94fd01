"""The argument parser of the commands that train, score, compare and publish, and of the benchmarks."""

import argparse
from typing import Any, NoReturn

from granite_scu.config.errors import UserError


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and reports a wrong flag in one line, through ``UserError``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see --help")

    def add_debug(self, group: argparse._ArgumentGroup | None = None) -> None:
        """The flag that error messages speak of; ``guard.guarded`` is told whether it was given."""
        (group or self).add_argument("--debug", action="store_true", help="show the traceback of an error")
