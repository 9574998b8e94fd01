"""What the benchmarks share: their flags, a case of a comparison, its table and its JSON."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.gate import Outcome
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import UserError
from granite_scu.hardware import detection

T, R = TypeVar("T"), TypeVar("R")

WIDTH = 160
"""Columns of a table where the output is no terminal, which has no width of its own."""


def build_parser(description: str, repeats: int, quick: int) -> Parser:
    """The flags that every comparison has, with so many turns usually and with --quick; see ``parse``."""
    parser = Parser(description=description.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print a JSON list of cases on stdout, nothing else there")
    parser.add_argument("--quick", action="store_true", help="few cases, under a minute on two cores")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA when there")
    parser.add_argument("--repeats", type=int, help=f"timed turns of each side (default: {repeats}, quick {quick})")
    parser.add_debug()
    parser.set_defaults(usual=repeats, few=quick)
    return parser


def shown(values: Iterable[int]) -> str:
    """The default of a flag that takes several values, as one would give it."""
    return " ".join(map(str, values))


def parse(parser: Parser) -> Namespace:
    """The flags given; ``device`` is then "cpu" or "cuda" and ``repeats`` a number."""
    options = parser.parse_args()
    if options.repeats is None:
        options.repeats = options.few if options.quick else options.usual
    require_positive(repeats=options.repeats)
    options.device = resolve_device(options.device)
    options.turns = 2 + options.repeats  # loading and warming up are the first two
    return options


def resolve_device(asked: str) -> str:
    """ "cpu" or "cuda". Raises UserError when CUDA is asked for and not there."""
    import torch

    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise UserError("--device cuda: there is no CUDA device; use --device cpu")
    return "cuda" if asked != "cpu" and there else "cpu"


def require_positive(**values: int | list[int] | None) -> None:
    """Refuse a count below 1; None counts as not given."""
    for name, given in values.items():
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def usable(precisions: list[str], device: str) -> list[str]:
    """The precisions without bf16 where the device would emulate it, said on stderr."""
    found = detection.detect(device)
    if "bf16" in precisions and not found.supports_bf16:
        print(f"bf16 cases left out: {found.name} has no bf16 products and would emulate them", file=sys.stderr)
        return [precision for precision in precisions if precision != "bf16"]
    return precisions


def compared(case: str, device: str, ours: Outcome, theirs: Outcome, units: int = 1, **facts: Any) -> dict[str, Any]:
    """A case: times, memory and their ratios; null where a side could not be measured, and ``reason`` says why.

    Args:
        case: its name.
        device: "cpu" or "cuda".
        ours: what our side did.
        theirs: what the other did.
        units: what a turn consists of; times are of one.
        facts: further fields.
    """
    reasons = [f"{name}: {o.reason}" for name, o in (("ours", ours), ("theirs", theirs)) if o.reason]
    return {
        "case": case,
        "ours_s": ratio(ours.seconds, units),
        "theirs_s": ratio(theirs.seconds, units),
        "speedup": ratio(theirs.seconds, ours.seconds),
        "ours_extra_gb": ours.extra_gb,
        "theirs_extra_gb": theirs.extra_gb,
        "memory_ratio": ratio(ours.extra_gb, theirs.extra_gb),
        **facts,
        "reason": "; ".join(reasons) or None,
        "device": detection.detect(device).name,
        "cores": os.cpu_count(),
    }


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient; None where one is missing or nothing is divided by."""
    return numerator / denominator if numerator is not None and denominator else None


def measure_each(cases: Iterable[T], turns: int, run_case: Callable[[T, Callable[[], None]], R]) -> list[R]:
    """What ``run_case`` finds of each case, with a live line on stderr.

    Args:
        cases: what is to be measured, one by one: a case may be there only while it is looked at.
        turns: rounds of a case.
        run_case: measures a case; its second argument is to be called after each round.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:

        def measured(case: T) -> R:
            return run_case(case, partial(shown.advance, shown.add_task(str(case), total=turns)))

        return [measured(case) for case in cases]


def present(cases: list[dict[str, Any]], columns: dict[str, str], title: str, as_json: bool) -> None:
    """The cases on stdout, as JSON or as a table.

    Args:
        cases: what was found.
        columns: of the table: heading and format of each field shown, as ``{"ours_s": "ours s|.3f"}``; those that no
            case has are left out.
        title: of the table.
        as_json: everything, as a JSON list.
    """
    if as_json:
        print(json.dumps(cases, indent=1))
        return
    table = Table(title=title)
    styles = {}
    for name, column in columns.items():
        if any(case.get(name) is not None for case in cases):
            heading, _, styles[name] = column.partition("|")
            table.add_column(heading, justify="right" if styles[name] else "left", no_wrap=name == "case")
    for case in cases:
        table.add_row(*(_cell(case.get(name), style) for name, style in styles.items()))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)


def _cell(value: Any, style: str) -> str:
    return "-" if value is None else format(value, style)
