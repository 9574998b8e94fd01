#!/usr/bin/env python3
"""Whether a loop holds drift at its budget, and whether that pays: what is learned against what is lost, arm by arm.

    python scripts/fetch_smollm2.py                              # the real model, once
    python benchmarks/drift.py --minutes 60                      # the next cells, in order of worth; again continues
    python benchmarks/drift.py --only tiny facts loop --minutes 20
    python benchmarks/drift.py --table holds                     # drift at the end over the budget; trains nothing
    python benchmarks/drift.py --table pays                      # what every arm learned and lost
    python benchmarks/drift.py --only smollm2 facts --chart drift.png

Each run is a LoRA at the product's defaults (rank 16, alpha 32, all linear layers, AdamW, cosine), about eight records
a step, on one thread. A finished run is a line of --results, and is not run again. Beside them lies the general text
of each base, written once and given to every arm that has any. Arms:

plain       no controller; measured too are the adapters on the way, the last one scaled, and a mean of the last three
loop        --max-drift at five budgets
ziegler     one of them, held by the law of research.laws.ziegler
fixed       lambda times drift, at four values
inputs      the same on the records that are trained on (LwF)
size        the loop that holds S, at three setpoints
replay      general text is trained on too, about as many of its tokens as an anchor has

Of each is measured:

right       held-out questions whose answers are as expected, generated at temperature 0
bits        a token of the held-out answers, or passages, and what the base has
drift       KL(base || now) over the base's bits, on general text of the base's own that no arm has seen
lost        of 30 questions with known answers those that the base had right; bits a token that the base's answers to 24
            general questions, other chats, a speech and Python source cost more than at the base
"""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.table import Table

from benchmarks import cells
from benchmarks.drift_grid import CELLS, Cell, more, saved
from granite_scu.cli import exit_codes
from granite_scu.cli.console import WIDE, make_console

RESULTS = ROOT / "research" / "evidence" / "drift" / "runs.jsonl"
Line = dict[str, Any]


def main() -> int:
    parser = cells.build_parser(str(__doc__), RESULTS)
    parser.add_argument("--table", choices=TABLES, help="print a table of the finished runs")
    options, console = parser.parse_args(), make_console(width=WIDE)
    chosen, finished = cells.chosen(CELLS, options.only), cells.read(options.results, Cell.of)
    if options.list:
        cells.show(chosen, finished, console)
    elif options.table or options.chart:
        lines = cells.finished_lines(chosen, finished, options.results)
        if options.table:
            console.print(TABLES[options.table](lines))
        if options.chart:
            from benchmarks.drift_chart import write

            write(lines, options.chart)
    else:
        from benchmarks.drift_training import run  # late: it takes seconds

        to_do = (cell for cell in chosen if cell not in finished)
        cells.run_each(to_do, lambda cell: cell.base, partial(run, folder=options.results.parent), options, console)
    return 0


def holds(lines: Iterable[Line]) -> Table:
    """Drift at the end over the budget, a row for every base, data and rate, a column for every budget."""
    loops = [line for line in lines if line["arm"] in ("loop", "ziegler")]
    budgets = sorted({line["value"] for line in loops})
    rows: dict[tuple, dict[float, str]] = {}
    for line in sorted(loops, key=_held_by):
        rows.setdefault(_held_by(line), {})[line["value"]] = _held(line)
    made = Table(
        title="drift at the end, on general text that the loop did not see, over the budget; lambda, ! at a bound"
    )
    for name in ("base", "data", "arm", "records", "rate", "seed", *(f"{budget:.1%}" for budget in budgets)):
        made.add_column(name, justify="left" if name in ("base", "data", "arm") else "right")
    for (base, data, records, _, rate, text, seed, arm), row in rows.items():
        named = base, _data(data, text), arm, f"{records:,}", f"{rate:g}", str(seed)
        made.add_row(*named, *(row.get(budget, "") for budget in budgets))
    return made


def _held_by(line: Line) -> tuple:
    return *_setting(line), line["arm"]


def _held(line: Line) -> str:
    if "failed" in line:
        return "diverged"
    loop = line["loop"]
    return f"{loop['held_out'] / line['value']:.2f} ({loop['lambda']:.2g}{'!' * loop['at_bound']})"


def pays(lines: Iterable[Line]) -> Table:
    """What was learned and lost, a row for every point."""
    made = Table(title="learned and lost")
    for name in PAYS:
        made.add_column(name, justify="left" if name in ("base", "data", "arm") else "right")
    for line in sorted(lines, key=lambda line: (*_setting(line), line["arm"], line["value"])):
        for name, point in line.get("points", {}).items():
            made.add_row(*row(line, name, point))
    return made


PAYS = ("base", "data", "records", "rate", "arm", "right", "bits saved", "drift", "known lost", "general", "chats",
        "prose", "source", "cpu s")  # fmt: skip


def row(line: Line, name: str, point: Line) -> list[str]:
    """A point of a run as cells of the table, in the order of ``PAYS``."""
    cell = Cell.of(line)
    return [
        cell.base,
        _data(cell.data, cell.text),
        f"{cell.records:,}",
        f"{cell.rate:g}",
        cell.way if name == "end" else f"{cell.way}, {name}",
        f"{point['right']} of {point['questions']}" if "right" in point else "-",
        f"{saved(line, point):.1%}",
        f"{point['drift']:.2%}",
        f"{point['known_lost']} of {point['known_right_base']}",
        *(f"{more(line, point, what):+.2f}" for what in ("general", "chats", "prose", "source")),
        f"{line['train_cpu_s']:.0f}" if name == "end" else "",
    ]


def _data(data: str, text: str) -> str:
    return data if text == "free" else f"{data}, {text}"


def _setting(line: Line) -> tuple:
    return tuple(line[name] for name in ("base", "data", "records", "epochs", "rate", "text", "seed"))


TABLES = {"holds": holds, "pays": pays}

if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv))
