#!/usr/bin/env python3
"""Which learning rate and how many epochs: real training over kinds of data, their amount, rates and epochs.

    python scripts/fetch_smollm2.py                              # the real model, once
    python benchmarks/learning_rates.py --minutes 60             # the next cells, in order of worth; again goes on
    python benchmarks/learning_rates.py --only "facts 100 records" --minutes 20
    python benchmarks/learning_rates.py --table                  # what the finished runs say; trains nothing
    python benchmarks/learning_rates.py --chart docs/images/learning-rate.png
    python benchmarks/learning_rates.py --write facts 1000 FOLDER       # the data as train.jsonl and test.jsonl

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

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.table import Table

from benchmarks import cells
from benchmarks.learning_rates_data import lesson
from benchmarks.learning_rates_grid import CELLS, Cell, lost, saved
from granite_scu.cli import exit_codes
from granite_scu.cli.console import WIDE, make_console
from granite_scu.config.errors import UserError

RESULTS = ROOT / "research" / "evidence" / "rates" / "runs.jsonl"


def main() -> int:
    parser = cells.build_parser(str(__doc__), RESULTS)
    parser.add_argument("--table", action="store_true", help="print a table of the finished runs")
    parser.add_argument(
        "--write", nargs=3, metavar=("KIND", "RECORDS", "FOLDER"), help="write the data; trains nothing"
    )
    options, console = parser.parse_args(), make_console(width=WIDE)
    if options.write:
        write_data(*options.write)
        return 0
    chosen, finished = cells.chosen(CELLS, options.only), cells.read(options.results, Cell.of)
    if options.list:
        cells.show(chosen, finished, console)
    elif options.table or options.chart:
        lines = cells.finished_lines(chosen, finished, options.results)
        if options.table:
            console.print(table(lines))
        if options.chart:
            from benchmarks.learning_rates_chart import write

            write(lines, options.chart)
    else:
        from benchmarks.learning_rates_training import run  # late: it takes seconds

        cells.run_each((cell for cell in chosen if cell not in finished), lambda cell: cell.model, run, options,
                       console)  # fmt: skip
    return 0


def write_data(kind: str, records: str, folder: str) -> None:
    """Write what is trained on, and what is asked, as files that ``granite-scu train`` reads."""
    try:
        made = lesson(kind, int(records))
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(f"--write {kind} {records}: give facts, style, format, text or code, and a number of records "
                        "that there are") from error  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, part in (("train", made.train), ("test", made.held_out)):
        (Path(folder) / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))


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
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv))
