#!/usr/bin/env python3
"""The Mamba-2 scan, forward and backward: ours against the PyTorch reference in transformers.

    python benchmarks/scan.py --quick                2 x 1024 tokens and less, under a minute on two cores
    python benchmarks/scan.py --json > out.json      2 x 256 to 2 x 8192 tokens
    python benchmarks/scan.py --device cuda --lengths 4096 --repeats 50

Compared are ``granite_scu.model.mamba2.ssd.ssd_scan`` and the function that transformers' Granite-4.0-H layers call
without mamba-ssm, in the dimensions of Granite-4.0-H-1B (48 heads of 64, state 128, one group, the library's chunk of
256), with gradients for x, dt, B and C. In fp32, and in bf16 as a layer sees it: under autocast, with x, B and C in
bf16 and dt in fp32. On CUDA the compiled scans that are installed are further sides, ``mamba_ssm_*`` and
``fla_core_*``.

The sides take turns, each in a process of its own. ``extra_gb`` is the most memory on top of the inputs: resident on a
CPU, of the allocator on CUDA. ``max_rel_err`` is the largest |ours - reference| / |reference| over the output and the
gradients, the reference being transformers' function in fp32 on the same inputs; ``their_rel_err`` is the same for
them. ``linearity`` is our time per token over that of the shortest length.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import psutil

from benchmarks import measure
from benchmarks.gate import GIB, Gate, Outcome, Side, race
from benchmarks.measure import ratio, shown
from granite_scu.cli import exit_codes

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
HEADS, HEAD_DIM, STATE, GROUPS, CHUNK = 48, 64, 128, 1, 256
REFERENCE_TENSORS = 13
"""fp32 tensors of (batch, chunks, chunk, chunk, heads) that the reference holds at its peak: 12.3 were measured."""

COLUMNS = {
    "case": "case", "ours_s": "ours s|.4f", "theirs_s": "theirs s|.4f",
    "mamba_ssm_s": "mamba-ssm s|.4f", "fla_core_s": "fla-core s|.4f",
    "speedup": "speedup|.2f", "ours_us_per_token": "ours us/token|.1f", "theirs_us_per_token": "theirs|.1f",
    "linearity": "linearity|.2f", "ours_extra_gb": "ours GiB|.3f", "theirs_extra_gb": "theirs GiB|.3f",
    "memory_ratio": "ratio|.2f", "ours_kib_per_token": "ours KiB/token|.0f", "theirs_kib_per_token": "theirs|.0f",
    "max_rel_err": "our error|.0e", "their_rel_err": "theirs|.0e",
    "reason": "not measured",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Inputs of the scan."""

    precision: str
    batch: int
    length: int
    heads: int = HEADS

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def __str__(self) -> str:
        return f"{self.precision} {self.batch} x {self.length}"


def inputs(case: Case, device: str) -> dict[str, Any]:
    """x, dt, a, b, c and d in the range of a trained layer, the same for every side."""
    import torch

    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(case.batch, case.length, *shape, generator=generator).to(device, dtype)

    def uniform(*shape: int, low: float, high: float) -> torch.Tensor:
        return (low + (high - low) * torch.rand(*shape, generator=generator)).to(device)

    return {
        "x": normal(case.heads, HEAD_DIM),
        "dt": uniform(case.batch, case.length, case.heads, low=math.log(1e-3), high=math.log(1e-1)).exp(),
        "a": -uniform(case.heads, low=1, high=16),
        "b": normal(GROUPS, STATE),
        "c": normal(GROUPS, STATE),
        "d": uniform(case.heads, low=0.5, high=1.5),
    }


def ours() -> Callable:
    from granite_scu.model.mamba2.ssd import ssd_scan

    return ssd_scan


def theirs() -> Callable:
    import inspect

    from transformers.models.granitemoehybrid import modeling_granitemoehybrid

    # Unwrapped, because with mamba-ssm installed the wrapper calls its kernel.
    scan = inspect.unwrap(modeling_granitemoehybrid.mamba2_chunk_scan)
    return lambda x, dt, a, b, c, d: scan(x, dt, a, b, c, CHUNK, D=d)


def compiled(package: str) -> Callable:
    """The scan of a distribution of compiled kernels, as the layers of a run call it."""
    from granite_scu.model.mamba2 import kernels

    return kernels.CANDIDATES[package]().scan


def compiled_packages(device: str) -> dict[str, str]:
    """Distributions of compiled kernels that can run here, by the names of their sides."""
    from granite_scu.model.mamba2 import kernels

    return {name.replace("-", "_"): name for name in kernels.installed()} if device == "cuda" else {}


def scan_side(gate: Gate, load: Callable[[], Callable], case: Case, exact: bool, results: Path) -> None:
    """Forward and backward, again and again; the first results go to a file.

    Args:
        gate: waited at before every turn.
        load: returns the scan.
        case: the inputs.
        exact: bring the inputs to fp32 first and compute without autocast.
        results: where output and gradients go.
    """
    import torch

    scan = load()
    autocast = case.precision == "bf16" and not exact

    def turn(given: dict[str, torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
        wanted = [given[name] for name in ("x", "dt", "b", "c")]
        with torch.autocast(gate.device, torch.bfloat16, enabled=autocast):
            y = scan(*given.values())
        return [y.detach(), *torch.autograd.grad(y, wanted, upstream.to(y.dtype))]

    def prepared(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        given = {name: tensor.float() if exact else tensor for name, tensor in inputs(case, gate.device).items()}
        for name in ("x", "dt", "b", "c"):
            given[name].requires_grad_()
        return given, torch.randn(given["x"].shape, generator=torch.Generator().manual_seed(1)).to(gate.device)

    turn(*prepared(replace(case, length=min(case.length, 64))))  # loads code, which is no tensor of the scan's
    work = prepared(case)
    gate.wait()
    while True:
        found = turn(*work)
        gate.wait(lambda found=found: _saved(found, results))
        del found


def _saved(found: list, path: Path) -> dict[str, Any]:
    """Write the first results; there is nothing else to report."""
    import torch

    if not path.exists():
        torch.save(found, path)
    return {}


def largest_error(path: Path, reference: Path) -> float | None:
    """The largest relative error over output and gradients, by the norm; None where there is none to compare."""
    import torch

    if not (path.exists() and reference.exists()):
        return None
    pairs = zip(torch.load(path, map_location="cpu"), torch.load(reference, map_location="cpu"), strict=True)
    return max(float((found.float() - exact).norm() / exact.norm()) for found, exact in pairs)


def missing_memory(case: Case, device: str, copies: int = REFERENCE_TENSORS) -> str | None:
    """Why the reference is not tried: it would need more memory than there is. None when it would not."""
    padded = CHUNK * math.ceil(case.length / CHUNK)
    needed = copies * 4 * case.batch * padded * CHUNK * case.heads
    if device == "cuda":
        import torch

        there = torch.cuda.mem_get_info()[0]
    else:
        there = psutil.virtual_memory().available
    return f"needs about {needed / GIB:.0f} GiB, {there / GIB:.0f} are free" if needed > 0.9 * there else None


def run_case(case: Case, device: str, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Time the sides in turn, then the reference in fp32 if the case is not."""
    packages = compiled_packages(device)
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("ours", "theirs", *packages, "reference")}

        def side(load: Callable[[], Callable], name: str, exact: bool = False) -> Side:
            return scan_side, (load, case, exact, paths[name])

        sides = {"ours": side(ours, "ours")}
        lacking = missing_memory(case, device)
        if not lacking:
            sides["theirs"] = side(theirs, "theirs")
        sides |= {name: side(partial(compiled, package), name) for name, package in packages.items()}
        outcomes = {"theirs": Outcome(reason=lacking)} | race(sides, device, repeats, advance)
        if case.precision == "fp32":
            paths["reference"] = paths["theirs"]
        elif not lacking:
            race({"reference": side(theirs, "reference", exact=True)}, device, 0)
        errors = {name: largest_error(paths[name], paths["reference"]) for name in sides}
    return _as_case(case, device, outcomes, errors)


def _as_case(case: Case, device: str, outcomes: dict[str, Outcome], errors: dict[str, float | None]) -> dict[str, Any]:
    facts: dict[str, Any] = {"max_rel_err": errors["ours"], "their_rel_err": errors.get("theirs")}
    for name in outcomes.keys() - {"ours", "theirs"}:
        found = outcomes[name]
        facts |= {f"{name}_s": found.seconds, f"{name}_extra_gb": found.extra_gb, f"{name}_rel_err": errors[name]}
    facts |= {"batch": case.batch, "length": case.length, "precision": case.precision}
    for name in ("ours", "theirs"):
        facts[f"{name}_us_per_token"] = _each(outcomes[name].seconds, case.tokens, 1e6)
        facts[f"{name}_kib_per_token"] = _each(outcomes[name].extra_gb, case.tokens, GIB / 1024)
    return measure.compared(str(case), device, outcomes["ours"], outcomes["theirs"], **facts)


def _each(value: float | None, count: int, unit: float) -> float | None:
    return None if value is None else unit * value / count


def with_linearity(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our time per token in each case over that of the shortest length in the same precision."""
    shortest: dict[str, float | None] = {}
    for case in sorted(cases, key=lambda case: case["length"]):
        first = shortest.setdefault(case["precision"], case["ours_us_per_token"])
        case["linearity"] = ratio(case["ours_us_per_token"], first)
    return cases


def main() -> int:
    parser = measure.build_parser(str(__doc__), repeats=5, quick=3)
    parser.add_argument("--lengths", type=int, nargs="+", help=f"tokens in a sequence (default: {shown(LENGTHS)})")
    parser.add_argument("--batch", type=int, default=2, help="sequences (default: 2)")
    parser.add_argument("--heads", type=int, default=HEADS, help=f"heads of {HEAD_DIM} (default: {HEADS})")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    options = measure.parse(parser)
    measure.require_positive(lengths=options.lengths, batch=options.batch, heads=options.heads)
    device = options.device
    quick = {"fp32": [256, 1024], "bf16": [1024]}  # two lengths show whether time is linear in them
    cases = [
        Case(precision, options.batch, length, options.heads)
        for precision in measure.usable(options.precisions, device)
        for length in options.lengths or (quick[precision] if options.quick else LENGTHS)
    ]
    found = measure.measure_each(
        cases, options.turns, lambda case, advance: run_case(case, device, options.repeats, advance)
    )
    measure.present(with_linearity(found), COLUMNS, "the scan, forward and backward", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
