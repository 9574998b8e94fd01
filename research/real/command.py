"""Evidence on real models: the runs of the protocol, their tables and pictures.

    python scripts/fetch_smollm2.py                                      # the real model, once
    python -m research.real --stage A --minutes 60                       # the next runs; again goes on
    python -m research.real --stage A --shard 1/2 --minutes 60           # those of half of the tasks
    python -m research.real --stage C --jobs 10 --minutes 600            # on a GPU of 80 GB
    python -m research.real --stage A --list                             # what is finished, and what can be run next
    python -m research.real --stage D --table drift                      # the criteria; auto, drift or arms
    python -m research.real --stage D --table tasks --only museum        # task by task; --rate 3e-3: at one rate
    python -m research.real --stage D --question drift --chart FILE      # the picture of a question

A finished run is a line of --results, and is not run again; runs on another device do not count. Which runs come next
follows from those that are finished: the learning rates widen until the best lies inside. Protocol:
research/evidence/real/protocol.md.
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

from rich.console import Console

from benchmarks import cells
from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.console import WIDE, make_console
from granite_scu.config.errors import UserError
from research.real.grid import RUNGS, STAGES, Cell, Finished, Line, Stage, to_do
from research.real.tasks import digest
from research.run_store import origin
from research.workers import workers

RESULTS = Path(__file__).parents[1] / "evidence" / "real" / "runs.jsonl"
ALL = "1/1"
"""The shard of all tasks."""


def main() -> int:
    """Run the cells of a stage that are missing, or show them."""
    parser = build_parser()
    options, console = parser.parse_args(), make_console(width=WIDE)
    options.device = options.device or ("cuda" if options.stage == "C" else "cpu")
    stage = STAGES[options.stage]
    tasks = of_shard(stage, options.shard)
    if options.rate and options.table != "tasks":
        raise UserError("--rate: is of --table tasks")
    if told := changed(options):
        if not (options.list or options.table or options.chart):
            raise UserError(f"{told}; name another file")
        make_console(stderr=True).print(f"{told}; left out", highlight=False)
    if options.list:
        finished = read(options)
        every = [*finished, *(cell for cell in to_do(stage, finished) if cell.task in tasks)]
        cells.show(cells.chosen(every, options.only), finished, console)
    elif options.table or options.chart:
        show(options, console)
    elif options.jobs == 1:
        from research.real.training import keep_models  # late: it takes seconds

        keep_models()
        train(options, tasks)
    else:
        in_processes(options, tasks)
    return 0


def read(options: argparse.Namespace, same: bool = True) -> Finished:
    """The stage's finished runs on the device, of records that are as they are now; or, not ``same``, the others."""
    stage = STAGES[options.stage]

    def wanted(line: Line) -> bool:
        of_stage = line["base"] in stage.bases and line["task"] in stage.tasks and line["device"] == options.device
        return of_stage and (line["digest"] == digest(line["task"])) == same

    return cells.read(options.results, Cell.of, wanted)


def changed(options: argparse.Namespace) -> str:
    """What is said of runs of a task that has other records now; nothing where there are none."""
    runs = Counter(cell.task for cell in read(options, same=False))
    told = ", ".join(f"{number} of {task}" for task, number in runs.items())
    return f"--results {options.results}: has runs of other records than these tasks have here: {told}" if told else ""


def show(options: argparse.Namespace, console: Console) -> None:
    """Print a table, draw a picture."""
    if options.shard != ALL:
        raise UserError("--shard: divides runs; of tables and pictures --only chooses the tasks")
    from research.real import chart, report  # late: it takes seconds
    from research.real.judgement import Judgement

    judgement = Judgement(STAGES[options.stage], read(options), options.only)
    if options.rate:
        report.tasks(judgement, console, options.rate)
    elif options.table:
        report.TABLES[options.table](judgement, console)
    if options.chart:
        chart.write(judgement, options.question, options.chart)


def in_processes(options: argparse.Namespace, tasks: Sequence[str]) -> None:
    """Run the missing cells of these tasks in several processes, each with its share of the tasks. One whose share is
    used up is given it again when all are, for the value of kl that has seeds is of all tasks."""
    from research.real.training import keep_models

    jobs, end = min(options.jobs, len(tasks)), time.monotonic() + 60 * options.minutes
    with workers(jobs, keep_models) as pool:
        while (left := end - time.monotonic()) > 0 and next(upcoming(options, tasks), None):
            options.minutes = left / 60
            running = [pool.submit(train, options, tasks[number::jobs]) for number in range(jobs)]
            wait(running)  # one that fails ends no other
            for each in running:
                each.result()


def train(options: argparse.Namespace, tasks: Sequence[str]) -> None:
    """Run the missing cells of these tasks, one after the other in this process, which reads each base once."""
    from research.real.training import run

    def here(cell: Cell, name: str) -> Line:
        line = run(cell, name, options.results.parent, options.device) | origin()
        of_task = (of for other, of in read(options).items() if (other.base, other.task) == (cell.base, cell.task))
        if any("at_base" in of for of in of_task):
            line.pop("at_base", None)  # the same for all runs of a task: it is kept once
        return line

    cells.run_each(upcoming(options, tasks), lambda cell: cell.base, here, options, make_console(width=WIDE))


def build_parser() -> Parser:
    """The flags."""
    parser = cells.build_parser(str(__doc__), RESULTS)
    parser.add_argument("--stage", choices=STAGES, default="A", help="bases, tasks and arms: A plain and auto on small "
                        "bases, B SmolLM2 on a CPU, C on a GPU, D all arms on the embedded hybrid, E a budget "
                        "of 2 %% on small bases")  # fmt: skip
    parser.add_argument("--shard", default=ALL, metavar="I/N", help="every N-th task, from the I-th on")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with its share of the shard's tasks")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what trains, and whose runs count; the default is "
                        "cuda for stage C and cpu for others")  # fmt: skip
    parser.add_argument("--table", choices=("auto", "drift", "arms", "tasks"), help="print the criteria of a question, "
                        "all arms, or these task by task")  # fmt: skip
    parser.add_argument("--rate", type=float, choices=RUNGS, metavar="X", help="of --table tasks: every arm at this "
                        "learning rate in place of its own")  # fmt: skip
    parser.add_argument("--question", choices=("auto", "drift"), default="drift", help="that --chart draws")
    return parser


def of_shard(stage: Stage, shard: str) -> Sequence[str]:
    """The tasks of a shard. All runs of a task are of one, for they follow from each other."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    first, of = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= of <= len(stage.tasks):
        raise UserError(f"--shard {shard}: must be I/N, I from 1 to N, and N at most the {len(stage.tasks)} tasks")
    return stage.tasks[first - 1 :: of]


def upcoming(options: argparse.Namespace, tasks: Sequence[str]) -> Iterator[Cell]:
    """The next cell of these tasks, as long as there is one that has the words of --only; the results are read again
    for each, those of other shards too, for the value of kl that has seeds is of all tasks."""
    while True:
        ready = to_do(STAGES[options.stage], read(options))
        own = (cell for cell in ready if cell.task in tasks)
        cell = next((cell for cell in own if all(word in str(cell) for word in options.only)), None)
        if cell is None:
            return
        yield cell
