#!/usr/bin/env python3
"""How long the commands take to answer: the help of each, and requests that are refused.

    python benchmarks/command_line.py                 five runs each, about a minute
    python benchmarks/command_line.py --repeats 9 --json

Each answer is a process of its own, timed from its start to its end; the figure is the median.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import measure
from granite_scu.cli import exit_codes
from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.command_table import BY_NAME

REFUSED = (
    ("train", "--bacth-size", "3"),
    ("train", "--target-s", "1.5"),
    ("train", "--hardware", "gpu_9"),
    ("train", "--config", "nope.yaml"),
    ("train", "--data-dir", "no/texts"),
    ("train", "--data.batch_size", "eight"),
    ("train", "--resume-from-checkpoint", "last", "--output-dir", "no/run"),
    ("fit", "--control.target", "0.1"),
)
"""Requests that no torch is needed for to refuse."""


def seconds(arguments: tuple[str, ...], repeats: int, code: int) -> float:
    """The median time of a command that ends with an exit code."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "granite_scu", *arguments], capture_output=True, cwd=ROOT)
        taken.append(time.perf_counter() - start)
        assert done.returncode == code, (arguments, done.stderr)
    return statistics.median(taken)


def main() -> int:
    """Time all of them and print a table; returns the exit code."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--json", action="store_true", help="print a JSON object on stdout, nothing else there")
    parser.add_debug()
    options = parser.parse_args()
    measure.require_positive(repeats=options.repeats)
    asked = {("--help",): 0, **{(name, "--help"): 0 for name in BY_NAME}, **dict.fromkeys(REFUSED, 2)}
    console = Console(stderr=True)
    each = track(asked.items(), "timing", console=console, transient=True, disable=not console.is_terminal)
    found = {" ".join(arguments): seconds(arguments, options.repeats, code) for arguments, code in each}
    if options.json:
        print(json.dumps({"repeats": options.repeats, "seconds": found}, indent=1))
        return 0
    table = Table("granite-scu ...", "seconds (median)")
    for name, taken in found.items():
        table.add_row(name, f"{taken:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
