"""Evidence on real models: the runs of the protocol, their tables and pictures.

    python scripts/fetch_smollm2.py                                      # the real model, once
    python -m research.real --stage A --minutes 60                       # the next runs; again goes on
    python -m research.real --stage A --shard 1/2 --minutes 60           # those of half of the tasks
    python -m research.real --stage C --device cuda --jobs 10 --minutes 10 --results FILE     # on a GPU of 80 GB
    python -m research.real --stage A --list                             # what is finished, and what can be run next
    python -m research.real --stage D --table drift                      # the criteria; auto, drift or arms
    python -m research.real --stage D --table tasks --only museum        # task by task
    python -m research.real --stage D --question drift --chart FILE      # the picture of a question

A finished run is a line of --results, and is not run again. Which runs come next follows from those that are finished:
the learning rates widen until the best lies inside. Protocol: research/evidence/real/protocol.md.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

from benchmarks import cells
from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.console import WIDE, make_console
from granite_scu.config.errors import UserError
from research.real.grid import STAGES, Cell, Line, Stage, to_do
from research.workers import workers

RESULTS = Path(__file__).parents[1] / "evidence" / "real" / "runs.jsonl"
ALL = "1/1"
"""The shard of all tasks."""


def main() -> int:
    """Run the cells of a stage that are missing, or show them."""
    parser = build_parser()
    options, console = parser.parse_args(), make_console(width=WIDE)
    stage = STAGES[options.stage]
    tasks = of_shard(stage, options.shard)
    if options.list:
        finished = cells.read(options.results, Cell.of)
        every = [*finished, *(cell for cell in to_do(stage, finished) if cell.task in tasks)]
        cells.show(cells.chosen(every, options.only), finished, console)
        return 0
    if options.table or options.chart:
        if options.shard != ALL:
            raise UserError("--shard: divides runs; of tables and pictures --only chooses the tasks")
        from research.real import chart, report  # late, and so is what follows: it takes seconds
        from research.real.judgement import Judgement

        judgement = Judgement(stage, cells.read(options.results, Cell.of), options.only)
        if options.table:
            report.TABLES[options.table](judgement, console)
        if options.chart:
            chart.write(judgement, options.question, options.chart)
        return 0
    from research.real.training import keep_models

    if options.jobs == 1:
        keep_models()
        train(options, options.shard)
        return 0
    with workers(options.jobs, keep_models) as pool:
        running = [pool.submit(train, options, f"{number}/{options.jobs}") for number in range(1, options.jobs + 1)]
        wait(running)  # one that fails ends no other
        for each in running:
            each.result()
    return 0


def train(options: argparse.Namespace, shard: str) -> None:
    """Run the missing cells of a shard, one after the other in this process, which reads each base once."""
    from research.real.training import run

    def here(cell: Cell, name: str) -> Line:
        line = run(cell, name, options.results.parent, options.device)
        told = (
            (other.base, other.task) for other, of in cells.read(options.results, Cell.of).items() if "at_base" in of
        )
        if (cell.base, cell.task) in told:
            line.pop("at_base", None)  # the same for all runs of a task: it is kept once
        return line

    stage = STAGES[options.stage]
    ready = upcoming(stage, of_shard(stage, shard), options.results, options.only)
    cells.run_each(ready, lambda cell: cell.base, here, options, make_console(width=WIDE))


def build_parser() -> Parser:
    """The flags."""
    parser = cells.build_parser(str(__doc__), RESULTS)
    parser.add_argument("--stage", choices=STAGES, default="A", help="bases, tasks and arms: A plain and auto on small "
                        "bases, B SmolLM2 on a CPU, C on a GPU, D all arms on the embedded hybrid")  # fmt: skip
    parser.add_argument("--shard", default=ALL, metavar="I/N", help="every N-th task, from the I-th on")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with its shard of the tasks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what trains")
    parser.add_argument("--table", choices=("auto", "drift", "arms", "tasks"), help="print the criteria of a question, "
                        "all arms, or these task by task")  # fmt: skip
    parser.add_argument("--question", choices=("auto", "drift"), default="drift", help="that --chart draws")
    return parser


def of_shard(stage: Stage, shard: str) -> Sequence[str]:
    """The tasks of a shard. All runs of a task are of one, for they follow from each other."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    first, of = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= of <= len(stage.tasks):
        raise UserError(f"--shard {shard}: must be I/N, I from 1 to N, and N at most the {len(stage.tasks)} tasks")
    return stage.tasks[first - 1 :: of]


def upcoming(stage: Stage, tasks: Sequence[str], results: Path, words: list[str]) -> Iterator[Cell]:
    """The next cell of these tasks, as long as there is one that has these words; the results are read again for each,
    those of other shards too, for the value of kl that has seeds is of all tasks."""
    while True:
        ready = to_do(stage, cells.read(results, Cell.of))
        own = (cell for cell in ready if cell.task in tasks)
        cell = next((cell for cell in own if all(word in str(cell) for word in words)), None)
        if cell is None:
            return
        yield cell
