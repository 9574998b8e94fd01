#!/usr/bin/env python3
"""Which learning rate and how many epochs: real training over kinds of data, their amount, rates and epochs.

    python scripts/fetch_smollm2.py                              # the real model, once
    python benchmarks/learning_rates.py --minutes 60             # the next cells, in order of worth; again goes on
    python benchmarks/learning_rates.py --only "facts 100 records" --minutes 20
    python benchmarks/learning_rates.py --table                  # what the finished runs say; trains nothing
    python benchmarks/learning_rates.py --chart docs/images/learning-rate.png

Each run is plain LoRA at the product's defaults (rank 16, alpha 32, all linear layers, AdamW, cosine, --controller
none), eight records a step, warm-up over 5 % of the steps, on one thread. A finished run is a line of --results, and
is not run again. Of each is measured:

right       held-out questions whose answers are as expected, generated at temperature 0; of facts they are a fourth
            phrasing of what was trained in three, of a style or a format other questions
bits        a token of the held-out answers (or passages), and what the base has
lost        bits a token that the answers of the base itself to 24 general questions cost more than at the base, an
            estimate of KL(base || now); and of 30 questions with known answers those that the base had right and the
            trained model has not
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.table import Table

from benchmarks.learning_rates_grid import CELLS, Cell, lost, saved
from granite_scu.cli import guard
from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.console import WIDE, make_console
from granite_scu.config.errors import UserError

RESULTS = ROOT / "evidence" / "rates" / "runs.jsonl"


def build_parser() -> Parser:
    parser = Parser(description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="the folder of SmolLM2-135M-Instruct; the default is where "
                        "scripts/fetch_smollm2.py puts it")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="only cells whose names have all of "
                        "these words, as in --list")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=60.0, help="start no cell after so many minutes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the finished runs: read, and added to")
    parser.add_argument("--list", action="store_true", help="print the cells and whether they are finished")
    parser.add_argument("--table", action="store_true", help="print a table of the finished runs")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the finished runs")
    parser.add_debug()
    return parser


def main() -> int:
    options = build_parser().parse_args()
    console = make_console(width=WIDE)
    cells = [cell for cell in CELLS if all(words in str(cell) for words in options.only)]
    if not cells:
        raise UserError(f"--only {' '.join(options.only)}: no cell has these words; see --list")
    finished = read(options.results)
    if options.list:
        for cell in cells:
            console.print(f"{'finished' if cell in finished else 'to do   '}  {cell}", highlight=False)
    elif options.table or options.chart:
        lines = [finished[cell] for cell in cells if cell in finished]
        if not lines:
            raise UserError(f"--results {options.results}: has no finished run of these cells")
        if options.table:
            console.print(table(lines))
        if options.chart:
            from benchmarks.learning_rates_chart import write

            write(lines, options.chart)
    else:
        _train([cell for cell in cells if cell not in finished], options, console)
    return 0


def read(path: Path) -> dict[Cell, dict[str, Any]]:
    """The finished runs by their cells; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {Cell.of(record): record for record in map(json.loads, lines)}


def _train(cells: Iterable[Cell], options: argparse.Namespace, console: Any) -> None:
    from benchmarks.learning_rates_training import run  # late: it takes seconds

    sys.path.insert(0, str(ROOT / "scripts"))
    from fetch_smollm2 import default_folder

    started = time.monotonic()
    smollm2 = Path(options.model) if options.model else default_folder(gguf_only=False)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        if time.monotonic() - started > 60 * options.minutes:
            return
        if cell.model == "smollm2" and not smollm2.is_dir():
            raise UserError(f"--model {smollm2}: no such folder; python scripts/fetch_smollm2.py makes it")
        console.print(str(cell), highlight=False)
        line = asdict(cell) | run(cell, str(smollm2) if cell.model == "smollm2" else cell.model)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        console.print(f"    {line}", highlight=False)


SETTING = ("model", "data", "records", "epochs", "rate")
COLUMNS = (*SETTING, "steps", "right", "bits saved", "lost, bits", "known lost", "cpu s")


def row(line: dict[str, Any]) -> list[str]:
    """A line of the results as cells of the table, in the order of ``COLUMNS``."""
    setting = [line["model"], line["data"], f"{line['records']:,}", f"{line['epochs']:g}", f"{line['rate']:g}"]
    if "failed" in line:
        return [*setting, str(line["steps"]), "diverged", "", "", "", ""]
    right = f"{line['right']} of {line['questions']}" if "right" in line else "-"
    return [
        *setting,
        str(line["steps"]),
        right,
        f"{saved(line):.0%}",
        f"{lost(line):+.2f}",
        f"{line['known_lost']} of {line['known_right_base']}",
        f"{line['cpu_s']:.0f}",
    ]


def table(lines: list[dict[str, Any]]) -> Table:
    """The runs, those of one kind of data together, by rising rate."""
    made = Table(title="learned and lost, by learning rate")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in ("model", "data") else "right")
    for line in sorted(lines, key=lambda line: [line[name] for name in SETTING]):
        made.add_row(*row(line))
    return made


if __name__ == "__main__":
    sys.exit(guard.guarded(main, "--debug" in sys.argv))
