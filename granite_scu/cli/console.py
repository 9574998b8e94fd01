"""What the commands print: where it goes, what is left out of it, and a table of facts."""

import logging
import warnings

from lightning_utilities.core.rank_zero import rank_zero_only
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from granite_scu.config.progress import LIVE, SHOWN, in_notebook

PIPE_WIDTH = 120
"""Columns where the output is no terminal, which has no width of its own."""

WIDE = 160
"""The same of tables with many columns."""


def make_console(stderr: bool = False, width: int = PIPE_WIDTH) -> Console:
    """Where a command speaks; of the processes of a run only the first does.

    Args:
        stderr: whether to stderr, not to stdout.
        width: columns where the output is no terminal.
    """
    # Lightning sets the rank as it is imported; what does not import it is one process.
    # A notebook is given plain lines: as HTML, each would be an output of its own.
    plain = {"force_jupyter": False, "force_terminal": False} if in_notebook() else {}
    console = Console(stderr=stderr, quiet=getattr(rank_zero_only, "rank", 0) != 0, **plain)
    if not console.is_terminal:
        console.width = width
    return console


def quiet(console: Console) -> None:
    """Our own log lines on the console; of the libraries only warnings, and not those that do not apply here."""
    handler = RichHandler(
        console=console, show_time=False, show_level=False, show_path=False, markup=False, highlighter=None
    )
    handler.setFormatter(logging.Formatter("%(message)s"))
    redrawn = console.is_terminal or in_notebook()
    handler.addFilter(lambda record: not (redrawn and getattr(record, LIVE, False)))
    handler.addFilter(lambda record: not getattr(record, SHOWN, False))
    ours = logging.getLogger("granite_scu")
    ours.setLevel(logging.INFO)
    ours.handlers[:] = [handler]
    ours.propagate = False
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "transformers", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def print_facts(title: str, facts: dict[str, str], console: Console) -> None:
    """Print a table of names and values, one a line."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name, Text(value, overflow="fold"))  # a path is no markup, and stays whole
    console.print(table)
