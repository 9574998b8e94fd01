#!/usr/bin/env python3
"""What a training step takes of a GPU, counted without one: bytes moved, kernel launches and operations, part by part.

    python research/counting/gpu_cost.py            the default model, 8 x 1024 tokens, bf16: about two minutes
    python research/counting/gpu_cost.py --sides eager compiled --block 2048 --json

Four sides: ours as PyTorch runs it operator by operator; ours with its layers and the loss's body compiled as
``--torch-compile`` does (lowered by Inductor for an H100, which takes Triton's package); the same with the scan of
mamba-ssm and the convolution of causal-conv1d (needs mamba-ssm's Python code); and Hugging Face's model with PEFT.
The counts are lower bounds: caches are taken for perfect within an operator, and for absent between two.
"""

import json
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from granite_scu.cli import exit_codes
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import UserError
from granite_scu.model import loading
from granite_scu.model.mamba2 import packages
from research.counting import operators as counting
from research.counting.operators import Cost, Step

SIDES = ("eager", "compiled", "with packages", "theirs")
PACKAGES = packages.kernels_of(packages.PACKAGES, "mamba-ssm and causal-conv1d")
NEEDED = {"compiled": {"Triton": "triton"}, "with packages": {"Triton": "triton", "mamba-ssm": "mamba_ssm"}}
"""Packages and modules that a side takes."""
INSTALL = "make .venv/.kernels"
GB, TERA = 1e9, 1e12
H200_BYTES_PER_S, H200_FLOPS = 0.85 * 4.8e12, 0.65 * 989e12
"""What a step is supposed to reach of the data sheet's bandwidth and of its dense bf16 products."""
Found = dict[tuple[str, str], Cost]


def lacking_for(side: str) -> str | None:
    """The package that a side cannot be counted without and that is not here."""
    return next((name for name, module in NEEDED.get(side, {}).items() if find_spec(module) is None), None)


def measured(side: str, step: Step) -> tuple[Found, int, float]:
    """The costs of a side, how many graphs it compiles, and the seconds of a CPU that it takes to trace and lower them.

    To compile the kernels takes more; but this part runs on one core, and so it is what a run waits for.
    """
    if side in ("eager", "theirs"):
        return counting.count(step, ours=side == "eager"), 0, 0.0
    from research.counting import lowering

    start = time.process_time()
    found, graphs = lowering.count(replace(step, kernels=PACKAGES) if side == "with packages" else step)
    return found, sum(graph["phase"] == "forward" for graph in graphs), time.process_time() - start


def h200_tokens_per_s(step: Step, total: Cost) -> float:
    """What the counts let expect of an H200 where memory and products take turns; within 30 % or so."""
    return step.batch * step.block / (total.bytes / H200_BYTES_PER_S + total.flops / H200_FLOPS)


def as_json(side: str, step: Step, found: Found, graphs: int, seconds: float) -> dict[str, Any]:
    """A side's counts, each part by pass."""
    total = counting.total(found)
    return {
        "side": side,
        "batch": step.batch,
        "block": step.block,
        "gradient_checkpointing": step.gradient_checkpointing,
        "gb": total.bytes / GB,
        "launches": total.launches,
        "tflop": total.flops / TERA,
        "h200_tokens_per_s_estimate": h200_tokens_per_s(step, total),
        "graphs": graphs,
        "lowering_cpu_s": seconds,
        "parts": [
            {"part": part, "pass": phase, "gb": c.bytes / GB, "launches": c.launches, "tflop": c.flops / TERA}
            for (part, phase), c in found.items()
        ],
    }


def table(side: str, step: Step, found: Found, graphs: int, seconds: float) -> Table:
    """A side's counts to be read: parts that move most first."""
    title = f"{side}: {step.batch} x {step.block} tokens" + (f", {graphs} graphs in {seconds:.0f} s" if graphs else "")
    columns = [f"{what} {phase}" for what in ("GB", "launches", "TFLOP") for phase in ("f", "b")]
    shown = Table("part", *columns, title=title)
    for column in shown.columns[1:]:
        column.justify = "right"
    for part in counting.parts(found):
        costs = [found.get((part, phase), Cost()) for phase in ("forward", "backward")]
        shown.add_row(part, *_cells(costs))
    passes = [counting.total({key: c for key, c in found.items() if key[1] == p}) for p in ("forward", "backward")]
    shown.add_section()
    shown.add_row("all", *_cells(passes))
    total = counting.total(found)
    shown.caption = (
        f"{total.bytes / GB:,.0f} GB, {total.launches:,.0f} launches, {total.flops / TERA:.1f} TFLOP; estimated on an "
        f"H200: {h200_tokens_per_s(step, total):,.0f} tokens/s"
    )
    return shown


def _cells(costs: list[Cost]) -> list[str]:
    return [
        *(f"{cost.bytes / GB:.1f}" for cost in costs),
        *(f"{cost.launches:,.0f}" for cost in costs),
        *(f"{cost.flops / TERA:.2f}" for cost in costs),
    ]


def main() -> int:
    """Count what the flags ask for and print it; returns the exit code."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="default: all that can be counted here")
    parser.add_argument("--batch", type=int, default=8, help="blocks in a micro-batch (default: 8)")
    parser.add_argument("--block", type=int, default=1024, help="tokens in a block (default: 1024)")
    parser.add_argument("--gradient-checkpointing", nargs="?", const="on", choices=("on", "selective"),
                        help="with activations recomputed; selective, of compiled layers: but products")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON list on stdout, nothing else there")
    parser.add_debug()
    options = parser.parse_args()
    measure.require_positive(batch=options.batch, block=options.block)
    lacking = {side: lacks for side in options.sides or SIDES if (lacks := lacking_for(side))}
    for side, lacks in lacking.items():
        if options.sides:
            raise UserError(f"--sides {side}: {lacks} is not installed; {INSTALL}")
        print(f"{side!r} is left out: {lacks} is not installed ({INSTALL})", file=sys.stderr)
    sides = [side for side in options.sides or SIDES if side not in lacking]
    recomputed = {None: False, "on": True}.get(options.gradient_checkpointing, options.gradient_checkpointing)
    step = Step(loading.default_config(), options.batch, options.block, recomputed)
    results = {side: measured(side, step) for side in sides}
    if options.json:
        print(json.dumps([as_json(side, step, *found) for side, found in results.items()], indent=1))
        return 0
    console = Console()
    console.width = console.width if console.is_terminal else measure.WIDTH
    for side, found in results.items():
        console.print(table(side, step, *found))
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
