"""What the commands print: where it goes, what is left out of it, and the tables of a run."""

import logging
import warnings
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from granite_scu.storage.run_folder import LAST_ADAPTER
from viz import adapter_size

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
    console = Console(stderr=stderr, quiet=getattr(rank_zero_only, "rank", 0) != 0)
    if not console.is_terminal:
        console.width = width
    return console


def quiet(console: Console) -> None:
    """Our own log lines on the console; of the libraries only warnings, and not those that do not apply here."""
    from granite_scu.training.callbacks.progress import LIVE  # late: it loads Lightning

    handler = RichHandler(
        console=console, show_time=False, show_level=False, show_path=False, markup=False, highlighter=None
    )
    handler.addFilter(lambda record: not (console.is_terminal and getattr(record, LIVE, False)))
    ours = logging.getLogger("granite_scu")
    ours.setLevel(logging.INFO)
    ours.handlers[:] = [handler]
    ours.propagate = False
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "transformers", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def print_facts(title: str, facts: dict[str, Any], console: Console) -> None:
    """Print a table of names and values, one a line; underscores in names become spaces."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {entry}" for key, entry in value.items())
        table.add_row(name.replace("_", " "), Text("none" if value is None else str(value)))  # a path is no markup
    console.print(table)


def print_summary(summary: dict, folder: Any, console: Console) -> None:
    """The short table at the end of a run."""
    start, held, target = summary.get("start_test_bpt"), summary["control"]["held_ticks"], summary["s_target"]
    size = adapter_size.describe(summary)
    gain = summary["base_test_bpt"] - summary["adapter_test_bpt"]
    share = f", mfu {summary['mfu']:.1%} of {summary['peak_tflops']:.3g} TFLOP/s" if summary.get("mfu") else ""
    facts = {
        "held-out documents, base": f"{summary['base_test_bpt']:.4f} bits/token",
        "held-out documents, adapter at the start": None if start is None else f"{start:.4f} bits/token",
        "held-out documents, adapter": f"{summary['adapter_test_bpt']:.4f} bits/token ({gain:+.4f} saved)",
        "validation": f"{summary['best_val_bpt']:.4f} bits/token",
        "adapter": which_adapter(summary),
        "S at the last step": "not measured" if summary["s_ema"] is None else f"{summary['s_ema']:.3%}",
        "S*": None if target is None else f"{target:.3%}{', at the last step' if size else ''}",
        "S* can be reached": None if target is None else _reachability(summary),
        "lambda at the last step": f"{summary['lambda']:.4g}",
        "size at the last step": size,
        "held ticks": f"{held}, without a usable measurement" if held else None,
        "training": f"{summary['steps']} steps, {summary['tokens']:,} tokens, {summary['train_time_s']:.0f} s, "
        f"{summary['tokens_per_s']:,.0f} tokens/s{share}",
        "stopped by": f"{summary['stopped']['reason']} at step {summary['stopped']['step']}",
        "files": str(folder),
    }
    print_facts("done", {name: fact for name, fact in facts.items() if fact is not None}, console)


def which_adapter(summary: dict) -> str:
    """Which step's adapter a run left, and what became of the last one."""
    kept = f"of step {summary['best_val_step']:,}, which validated best"
    if summary["best_val_step"] == summary["steps"]:
        return kept
    return f"{kept}; that of the last step has {summary['final_val_bpt']:.4f} bits/token and is in {LAST_ADAPTER}/"


def _reachability(summary: dict) -> str:
    found = summary["reachability"]
    if found is None:
        return "not judged: lambda is not asked to hold S at one setpoint throughout"
    if found["verdict"] == "reached":
        first = f"yes: at step {found['reached_at_step']} S was within {found['band']:.0%} of it"
        share = summary["control"]["in_band"]
        return first if share is None else f"{first}, and so at {share:.0%} of the ticks from there on"
    if found["verdict"] == "not shown":
        ended = "could not be measured" if summary["s_ema"] is None else f"ended at {summary['s_ema']:.3%}"
        never = f"at no usable tick was S within {found['band']:.0%} of it, and it {ended}"
        return f"not shown: {never}; nothing shows that it cannot"
    no = "no" if found["reached_at_step"] is None else f"no more, though S was there at step {found['reached_at_step']}"
    return f"{no}, {found['verdict']} since step {found['since_step']}: {found['advice']}"
