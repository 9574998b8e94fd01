"""``scripts/compare_controllers.py``: every way to set lambda, and what it makes."""

import argparse
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from granite_scu.cli.argument_parser import Parser, hyphenated
from granite_scu.cli.console import WIDE, make_console, quiet
from granite_scu.cli.exit_codes import exit_code_of
from granite_scu.config import settings
from granite_scu.config.errors import UserError
from granite_scu.storage.run_folder import require_writable
from research.run_store import RunStore, working_folder

if TYPE_CHECKING:
    from rich.console import Console

    from research.comparison.evidence import Evidence
    from research.comparison.plan import Plan
    from research.comparison.protocol import Protocol

PRECISIONS = {"auto": None, **{name: settings.PRECISIONS[name] for name in ("bf16", "fp32")}}
"""What the flag says, and the Trainer's name for it. On a CPU, where the runs are done, there is no fp16."""


ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

EXAMPLES = (
    "scripts/compare_controllers.py --quick",
    "scripts/compare_controllers.py --report-only",
    "scripts/compare_controllers.py --fresh --seeds 1 --shard 1/2",
)


def build_parser() -> Parser:
    parser = Parser(
        prog="scripts/compare_controllers.py",
        examples=EXAMPLES,
        description="Train the embedded model under every way to set lambda, and say what difference it makes. "
        "Finished runs are kept and never done again: stop at will, continue later, copy them between machines. "
        "Several machines share the work by --shard. "
        "All runs are done on the CPU, where there is a GPU too.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="a small comparison: about ten minutes on two cores")
    which.add_argument("--varied", action="store_true", help="the default, cascade, early stopping and five lambdas "
                       "at another rank, learning rate and sigma: two hours on two cores")  # fmt: skip
    which.add_argument("--fresh", action="store_true", help="text and models that formed no law: "
                       "ten hours on two cores; fetch the texts first: research/fetch_texts.py")  # fmt: skip
    which.add_argument("--fresh-again", action="store_true", help="other text that formed no law: five hours on two "
                       "cores; fetch the texts first")  # fmt: skip
    which.add_argument("--fresh-third", action="store_true", help="a third set of such text, with lower lambdas and "
                       "one more learning rate: six hours on two cores; fetch the texts first")  # fmt: skip
    which.add_argument("--scarce", action="store_true", help="the default in short runs and with little held-out "
                       "text: half an hour on two cores")  # fmt: skip
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these arms (and the runs that they depend on)")
    parser.add_argument("--seeds", type=int, metavar="N", help="only the first N seeds")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of every run instead of the protocol's")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time, a thread each (default: physical cores)")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="auto", help="of the runs, which are "
                        "compared with those in the same alone: bf16, as in research/evidence/, on a CPU that "
                        "computes it, else fp32; for --list and --report-only that of the finished runs")  # fmt: skip
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="do the I-th of N equal shares of the runs: N "
                        "machines that share the folder of finished runs do none twice")  # fmt: skip
    parser.add_argument("--max-runs", type=int, metavar="N", help="stop after N runs")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="what would run and what is finished; trains nothing")
    instead.add_argument("--report-only", action="store_true", help="train nothing, report on what is finished")
    parser.add_argument("--evidence", type=working_folder, metavar="FILE", help="the finished runs, a line each; while "
                        "the command runs, new ones are files in the folder of that name without .jsonl (default: "
                        "research/evidence/comparison/runs.jsonl, with --varied that of varied/ and so on; with "
                        "--quick, --steps or fp32, runs/compare/runs.jsonl)")  # fmt: skip
    parser.add_argument("--output-dir", type=Path, metavar="DIR",
                        help="for table and plot (default: research/evidence/comparison, with --varied "
                        "that of varied/; of a part, and of runs from elsewhere, runs/compare)")  # fmt: skip
    parser.add_debug()
    return parser


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Run the command; returns the exit code.

    Args:
        arguments: of the command.
        root: the checkout, or another folder that has its ``research/evidence`` and ``runs``.
    """
    how_to_continue = "the runs under way are lost, those finished are kept; the same command continues"
    given = [hyphenated(argument) for argument in arguments]
    return exit_code_of(lambda: _run(build_parser().parse_args(given), root), "--debug" in given, how_to_continue)


def _run(options: argparse.Namespace, root: Path) -> int:
    # Before torch is imported, here or in a worker: a worker is one thread.
    os.environ["OMP_NUM_THREADS"] = "1"
    from research.comparison import engine, report
    from research.comparison.plan import Plan
    from research.comparison.protocol import (
        FRESH,
        FRESH_AGAIN,
        FRESH_THIRD,
        FULL,
        PRECISION,
        QUICK,
        SCARCE,
        VARIED,
    )

    apart_from_full = (QUICK, VARIED, FRESH, FRESH_AGAIN, FRESH_THIRD, SCARCE)
    protocol = next((of for of in apart_from_full if getattr(options, of.name.replace("-", "_"))), FULL)
    _check(options, protocol, root)
    if options.steps:
        protocol = replace(protocol, tasks=tuple(replace(task, steps=options.steps) for task in protocol.tasks))
    console = make_console(width=WIDE)
    folder = "comparison" if protocol in (QUICK, FULL) else protocol.name
    published, apart = root / "research" / "evidence" / folder, root / "runs" / "compare"
    evidence = _evidence(options, published, apart, console)
    plan = Plan(protocol, evidence, options.tasks, options.arms, options.seeds)
    jobs = options.jobs or engine.cores()
    if options.list:
        _list(plan, jobs, console)
        return 0
    if options.report_only and not any(map(plan.record, plan.everything())):
        raise UserError(f"--evidence {evidence.folder}: holds no finished run of what was asked for; see --list")
    is_published = (evidence.folder.resolve(), evidence.precision) == ((published / "runs").resolve(), PRECISION)
    output = options.output_dir or (published if is_published and not _is_part(options) else apart)
    require_writable("--output-dir", output)
    waiting, errors = 0, {}
    if not options.report_only:
        require_writable("--evidence", evidence.folder)
        shard = engine.Shard.parse(options.shard)
        waiting, errors = engine.carry_out(plan, jobs, console, silence, options.max_runs, shard)
    from research.comparison import results  # late: it imports torch, which --list does without

    found = results.report(plan)
    report.show(found, console)
    for path in report.write(found, output):
        console.print(str(path), highlight=False)
    if not options.report_only:
        for task, arm, count in plan.unfinished_arms():
            console.print(
                f"missing in the report: {arm} of {task}, {count} of {len(plan.seeds)} seeds", highlight=False
            )
    if waiting:
        others = f"{waiting} runs of other shards are not finished; then the same command does what is left"
        console.print(others, highlight=False)
    for name, error in errors.items():
        print(f"error: {name}: {error}", file=sys.stderr)
    return 1 if errors else 0


def silence() -> None:
    """Have a worker's process train with one thread and say nothing."""
    import torch

    from granite_scu.cli import exit_codes

    torch.set_num_threads(1)
    quiet(make_console(stderr=True))
    exit_codes.silence_rename_warnings()
    logging.getLogger("granite_scu").setLevel(logging.WARNING)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)


def _check(options: argparse.Namespace, protocol: "Protocol", root: Path) -> None:
    """Refuse what the protocol does not have, before anything is read or trained."""
    for flag, given, known in (("tasks", options.tasks, protocol.tasks), ("arms", options.arms, protocol.arms)):
        names = dict.fromkeys(each.name for each in known)
        if unknown := [name for name in given or () if name not in names]:
            raise UserError(f"--{flag} {unknown[0]}: there is none of that name; there are {', '.join(names)}")
    for flag in ("seeds", "steps", "jobs", "max_runs"):
        count = getattr(options, flag)
        if count is not None and count < 1:
            raise UserError(f"--{flag.replace('_', '-')} {count}: must be at least 1")
    most = len(protocol.seeds)
    if options.seeds and options.seeds > most:
        raise UserError(f"--seeds {options.seeds}: the {protocol.name} protocol has {most}; give {most} or fewer")
    if options.report_only and options.max_runs:
        raise UserError("--report-only: trains nothing; leave out --max-runs")
    if options.report_only and options.evidence and not RunStore("--evidence", options.evidence).exists():
        raise UserError(f"--evidence {options.evidence}: there is no such folder; name that of the finished runs")


def _evidence(options: argparse.Namespace, published: Path, apart: Path, console: "Console") -> "Evidence":
    """The finished runs, in the precision that the command is about; says so where that is not the published one.

    Args:
        options: of the command line.
        published: where the repository has all runs of a long protocol.
        apart: where others are.
        console: to say it on.

    Raises:
        UserError: as ``Evidence`` does, or this CPU does not compute the precision.
    """
    from research.comparison.evidence import Evidence
    from research.comparison.protocol import PRECISION

    precision = PRECISIONS[options.precision]
    trains = not (options.list or options.report_only)
    if trains:
        from granite_scu.hardware import detection, machine  # imports torch, which takes seconds: not for --list

        precision = machine.resolve_precision(precision, detection.detect("cpu"))
    is_apart = options.quick or options.steps or precision not in (None, PRECISION)
    found = Evidence(options.evidence or (apart if is_apart else published) / "runs", precision)
    if found.precision == PRECISION:
        return found
    chosen = trains and options.precision == "auto"
    why = ", since PyTorch finds neither AMX nor AVX512-BF16 in this CPU" if chosen else ""
    others = f"compared among themselves, they do not join those in research/evidence/, which are in {PRECISION}"
    console.print(f"runs in {found.precision}{why}: {others}", highlight=False, soft_wrap=True)
    return found


def _is_part(options: argparse.Namespace) -> bool:
    """Whether the tables are about less than the protocol."""
    return any((options.quick, options.tasks, options.arms, options.seeds, options.steps))


def _list(plan: "Plan", jobs: int, console: "Console") -> None:
    from rich.table import Table

    from research.comparison import engine

    table = Table("task", "arm", "seeds finished", "seeds waiting", title="the runs asked for", title_justify="left")
    for task in plan.tasks:
        for arm in plan.arms:
            cells = [cell for cell in plan.cells() if cell.task is task and cell.arm is arm]
            finished = [cell.seed for cell in cells if plan.record(cell)]
            waiting = [cell.seed for cell in cells if cell.seed not in finished]
            table.add_row(task.name, arm.label, *(" ".join(map(str, seeds)) for seeds in (finished, waiting)))
    console.print(table)
    finished, total, each = engine.standing(plan)
    left = engine.format_duration((total - finished) * each / jobs) if total > finished else "no time"
    console.print(
        f"{finished} of {total} runs finished, tuning and base model included; {left} left with {jobs} workers "
        f"at {each:.0f} s a run",
        highlight=False,
    )
