"""How well S is held: real training on the embedded model over a grid of setpoints, rates, ranks, corpora and seeds.

    python -m research.tracking --quick            four cells, five to eight minutes on two cores
    python -m research.tracking --json > out.json  the whole grid, some eight hours; --results makes it resumable
    python -m research.tracking --data-dir my_texts/ --target-s 0.03   your text, your setpoint

One set of gains throughout. Each run is what a user would start with --no-isolate-documents, which is not the product's
default but how the published grid was measured; --set isolate_documents runs it with the default. It has 1400 optimizer
steps of 1024 tokens (half of them with --quick), a tick every 10, N = 24 576 tokens and a cosine schedule, in a process
with one thread. A disturbance that would move S* to 1 or beyond is left out, and named. Smoothed is S by one filter for
all laws and settings, that of the product's defaults, whatever a law acts on itself. A tick without a usable S is out
of band and otherwise passed over; travel and saturated are of lambda, and count every tick. What is reported:

settling    share of the run before the smoothed S has entered +-10 % of S*, for nine of the next ten ticks
in band     share of ticks at which the smoothed S is in +-10 % of S*, from the eleventh after that on
raw         largest |mean of the raw S over ten ticks / S* - 1| from there on
overshoot   peak of the smoothed S over S*, minus 1

and, after a disturbance at mid-run,

recovery    share of the run until S is back in band, in the same sense
peak, dip   largest and smallest smoothed S over the setpoint in force, minus 1; where the setpoint was moved, only
            what lies beyond the new one: before it is the way that S has to go

In band and raw are then the worse of before and after, settling and overshoot those before. Without a goal are peak and
dip, and what a run reports of itself (``granite_scu.control.diagnostics.metrics``):

early       in band, over the first 80 % of the run's steps: later the learning rate, and with it S, hardly moves
rise        share of the run until the smoothed S has first reached 90 % of S*
IAE         |ln(smoothed S / S*)|, averaged over the run
travel      sum of |change of ln lambda| over the run
saturated   share of ticks that leave lambda on a bound

A run that diverges is recorded with the reason and misses every goal. Exit code 1 when a cell misses a goal, 0 when no
finished one does: of a part of the grid, "goal_met" is then null and "complete" false.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]

from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.console import WIDE, make_console
from granite_scu.config.errors import UserError
from granite_scu.storage.run_folder import require_writable
from research.comparison.protocol import PRECISION
from research.run_store import RunStore, working_folder
from research.tracking.figures import BAND, points_of, smoothed, summarise
from research.tracking.grid import CORPORA, SETPOINTS, TrackingCell, digest, grid, left_out, quick
from research.tracking.report import describe_origin, origins, print_table
from research.tracking.runs import course, run_all

SEEDS = 3
LAWS = ("pi", "p", "i", "original", "projection")
"""Those that follow a setpoint."""
EXAMPLE = "kp=2 ki=0.3 isolate_documents"


def build_parser() -> Parser:
    summary = __doc__.partition("\n")[0]
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(description=summary, formatter_class=formatter)
    parser.add_argument("--quick", action="store_true", help="four cells, five to eight minutes on two cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout; progress goes to stderr")
    parser.add_argument("--target-s", type=float, nargs="+", default=list(SETPOINTS), help="setpoints, ratios")
    parser.add_argument("--data-dir", nargs="+", default=list(CORPORA), help="corpora, embedded or your own")
    parser.add_argument("--seeds", type=int, help=f"seeds of every combination, {SEEDS} where none are given; --quick "
                        "has its own")  # fmt: skip
    parser.add_argument("--controller", default="pi", choices=LAWS, help="the law")
    parser.add_argument("--set", nargs="+", default=[], metavar="FLAG[=VALUE]", help="flags of the training script for "
                        f"every run, without their leading hyphens: {EXAMPLE}")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once, one thread each")
    parser.add_argument(
        "--results",
        type=working_folder,
        metavar="FILE",
        help="the finished runs, a line each: "
        "read, and added to; while the command runs, new ones are files in the folder of that name "
        "without .jsonl",
    )
    parser.add_argument("--max-runs", type=int, help="stop after so many runs that were not finished before; 0 only "
                        "reports those in --results")  # fmt: skip
    parser.add_argument("--plot", type=Path, help="write the trajectories as PNG and SVG, at this path without suffix")
    parser.add_debug()
    return parser


def main() -> int:
    options = build_parser().parse_args()
    console = make_console(stderr=options.json, width=WIDE)
    _check(options)
    cells = _in_precision(_cells(options), options)
    for line in [] if options.quick else left_out(sorted(set(options.target_s))):
        console.print(line, highlight=False)
    results = run_all(cells, options.jobs, options.results, options.max_runs, console)
    if not results:
        raise UserError("--max-runs 0: no run of this grid is finished in --results; leave it out to run them")
    print_table(results, console)
    facts = summarise(results, len(cells))
    worst = {name: value for name, value in facts.items() if name.startswith("worst") and value is not None}
    console.print(", ".join(f"{name} {value:.3g}" for name, value in worst.items()))
    missing = "" if facts["complete"] else f"; {facts['of'] - facts['cells']} missing"
    console.print(f"{facts['cells']} of {facts['of']} runs{missing}", highlight=False)
    if cells[0].precision:
        note = "the published runs are in bf16, and these are kept apart from them"
        console.print(f"runs in {cells[0].precision}: {note}", highlight=False)
    where = origins(results)
    for origin in where:
        console.print(describe_origin(origin), highlight=False)
    if options.plot:
        from granite_scu.viz.style import save
        from research.tracking.plot import plot_tracking

        drawn = [(r["cell"], points_of(smoothed(course(TrackingCell.of(r), r["trajectory"])))) for r in results]
        save(plot_tracking(drawn, BAND), options.plot)
    if options.json:
        print(json.dumps({**facts, "origins": where, "results": results}))
    return 1 if facts["missed"] else 0


def _check(options: argparse.Namespace) -> None:
    for setpoint in options.target_s:
        if not 0 < setpoint < 1:
            raise UserError(f"--target-s {setpoint}: must lie between 0 and 1, for example 0.02")
    for name, least in (("seeds", 1), ("jobs", 1), ("max_runs", 0)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    if options.quick and options.seeds is not None:
        raise UserError("--seeds: the four runs of --quick have seeds of their own; leave one of the two out")
    if options.results and options.results.exists() and not options.results.is_dir():
        raise UserError(f"--results {options.results}: is a file; name a folder")
    if options.max_runs == 0 and options.results is None:
        raise UserError("--max-runs 0: no run of this grid is finished, without --results; leave it out to run them")
    if options.results and options.max_runs != 0:
        require_writable("--results", options.results)
    if options.plot:
        require_writable("--plot", options.plot.parent)


def _cells(options: argparse.Namespace) -> list[TrackingCell]:
    """The runs asked for, each once."""
    settings, setpoints = [f"--{setting}" for setting in options.set], sorted(set(options.target_s))
    if options.quick:
        cells = quick(setpoints, options.data_dir, options.controller, settings)
    else:
        cells = grid(setpoints, options.data_dir, options.seeds or SEEDS, options.controller, settings)
    contents = {corpus: digest(corpus) for corpus in options.data_dir}
    return list(dict.fromkeys(replace(cell, content=contents[cell.corpus]) for cell in cells))


def _in_precision(cells: list[TrackingCell], options: argparse.Namespace) -> list[TrackingCell]:
    """The cells in what this machine's CPU computes in; those that are only to be reported in what they were done in.

    On a CPU the precision goes with the machine, and no difference between runs shall be one between machines.
    """
    if options.max_runs == 0:
        finished = {run.key for run in RunStore("--results", options.results).read()}
        if any(cell.key() in finished for cell in cells):
            return cells
    from granite_scu.hardware import detection, machine  # imports torch, which takes seconds

    found = machine.resolve_precision(None, detection.detect("cpu"))
    return cells if found == PRECISION else [replace(cell, precision=found) for cell in cells]
