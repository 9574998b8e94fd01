#!/usr/bin/env python3
"""The kernels that Inductor writes for a training step, compiled for a card without one: instructions, registers.

    python research/counting/gpu_kernels.py                     the default model, 8 x 1024 tokens: about two minutes
    python research/counting/gpu_kernels.py --capability 80     the same kernels for an A100

``gpu_cost.py`` counts the bytes that a step moves. A kernel that computes much for every number is slower than its
bytes say, and one that spills keeps in memory what does not fit into registers. Each kernel is compiled by Triton and
ptxas in every configuration that Inductor would try, and its machine code is counted. ``ms`` is what an H100 takes to
issue a step's instructions, one a clock in each of its 528 schedulers: a lower bound. Of the configurations the one
that is issued fastest is shown. The library's matrix products are not among the kernels.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import measure
from granite_scu.cli import exit_codes
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import UserError
from granite_scu.model import loading
from research.counting import gpu_cost
from research.counting.operators import Step

ISSUED = 132 * 4 * 1.98e9
"""Instructions that an H100 issues in a second."""

SHARED = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that a block may have: of T4, A100, A10, RTX 4090, H100, B200 and RTX 5090."""

COLUMNS = {
    "kernel": "kernel", "phase": "pass", "calls": "calls a step|,d", "ms": "ms a step|.2f",
    "instructions": "instructions|,d", "registers": "registers|d", "spilled": "spilled bytes|d", "shared": "shared|,d",
    "configuration": "configuration",
}  # fmt: skip
SHOWN, NAME = 20, 28
"""Kernels in the table, and characters of a name."""


@dataclass(frozen=True)
class Kernel:
    """A kernel in one of its configurations.

    Attributes:
        kernel: Inductor's name for it.
        phase: "forward" or "backward".
        calls: in a step.
        configuration: sizes of its blocks, and warps.
        instructions: that a warp executes; what is in a loop counts as often as it is run.
        ms: in which a step's calls are issued.
        registers: of a thread.
        spilled: bytes of a thread that did not fit into registers.
        shared: bytes of shared memory of a block.
    """

    kernel: str
    phase: str
    calls: int
    configuration: str
    instructions: int
    ms: float
    registers: int
    spilled: int
    shared: int


def kernels_of(graphs: list[dict[str, Any]], capability: int) -> list[Kernel]:
    """Every kernel of the graphs of a step in its best configuration, the slowest first.

    Args:
        graphs: of ``lowering.count``.
        capability: 90 is an H100's.
    """
    with _offline(capability):
        tried = _tried(graphs, capability)
        found = [min(kernels, key=lambda kernel: (kernel.spilled > 0, kernel.ms)) for kernels in tried]
    return sorted(found, key=lambda kernel: -kernel.ms)


def misfits(graphs: list[dict[str, Any]], capability: int) -> list[str]:
    """The kernels that spill in every configuration, or ask for more shared memory than a block may have."""
    most, found = SHARED[capability], []
    with _offline(capability):
        for tried in _tried(graphs, capability):
            for kernel in tried:
                if not kernel.spilled and kernel.shared <= most:
                    break
            else:
                found.append(kernel.kernel)
    return found


@contextmanager
def _offline(capability: int) -> Iterator[None]:
    """Inductor and Triton compile for a card that is not here."""
    import triton
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers

    from research.counting.lowering import as_on_h100

    with (
        as_on_h100(),
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        config.patch(use_static_cuda_launcher=False),
    ):
        target = replace(triton.runtime.driver.active.get_current_target(), arch=capability)
        triton.runtime.driver.active.get_current_target = lambda: target
        yield


def _tried(graphs: list[dict[str, Any]], capability: int) -> Iterator[Iterator[Kernel]]:
    """Each kernel in one configuration after the other, compiled as it is asked for."""
    for graph in graphs:
        for name, source in _sources(graph["code"]).items():
            calls = graph["calls"] * len(re.findall(rf"\b{name}\.run\(", graph["code"]))
            yield _configurations(name, source, capability, graph["phase"], calls)


def _sources(code: str) -> dict[str, str]:
    """The source of each Triton kernel in what Inductor has written."""
    return dict(re.findall(r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", code, re.S))


def _configurations(name: str, source: str, capability: int, phase: str, calls: int) -> Iterator[Kernel]:
    from torch._inductor.codecache import PyCodeCache

    source = source.replace("cc=90", f"cc={capability}").replace("major=9", f"major={capability // 10}")
    sizes = {axis: int(count) for axis, count in re.findall(r"^    (\w+numel) = (\d+)", source, re.MULTILINE)}
    tuner = getattr(PyCodeCache.load(source), name)
    for configuration in tuner.configs:
        yield _counted(name, phase, calls, configuration, tuner._precompile_config(configuration).kernel, sizes)


def _counted(name: str, phase: str, calls: int, configuration: Any, kernel: Any, sizes: dict[str, int]) -> Kernel:
    blocks = configuration.kwargs
    programs, trips = 1, 1
    for axis, count in sizes.items():
        letter = axis.removesuffix("numel").rstrip("_").upper()
        pieces = -(-count // blocks.get(f"{letter}BLOCK", blocks.get(f"{letter}_BLOCK", count)))
        programs, trips = (programs, trips * pieces) if letter.startswith("R") else (programs * pieces, trips)
    usage, code = (_inspected(kernel.asm["cubin"], flag) for flag in ("-res-usage", "-sass"))
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
    executed = instructions(code, trips)
    shape = ", ".join(f"{axis} {size}" for axis, size in blocks.items())
    return Kernel(
        kernel=name,
        phase=phase,
        calls=calls,
        configuration=f"{shape}, {configuration.num_warps} warps",
        instructions=executed,
        ms=1000 * calls * programs * configuration.num_warps * executed / ISSUED,
        registers=registers,
        spilled=stack,
        shared=kernel.metadata.shared,
    )


def _inspected(cubin: bytes, flag: str) -> str:
    """What the cuobjdump in Triton's package says of machine code."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([program, flag, path], capture_output=True, text=True, check=True).stdout


def instructions(code: str, trips: int) -> int:
    """Instructions that a warp executes.

    Args:
        code: as cuobjdump prints it: a line each, with its address and, of a jump, that of its target.
        trips: how often a loop is run. What stands between a jump back and its target is one.
    """
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)([^;]*);", code)
    jumps = [(int(rest.split()[-1], 16), int(at, 16)) for at, name, rest in lines if name == "BRA" and "0x" in rest]
    loops = [(target, at) for target, at in jumps if target < at]
    times = {at: trips if any(a <= int(at, 16) <= b for a, b in loops) else 1 for at, _, _ in lines}
    return sum(times[at] for at, name, _ in lines if name != "NOP")


def short(name: str) -> str:
    """A name without its middle; its number tells it from others."""
    name = name.removeprefix("triton_")
    return name if len(name) <= NAME else f"{name[: NAME - 8]}..{name[-6:]}"


def main() -> int:
    """Count what the flags ask for and print it; returns the exit code."""
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--batch", type=int, default=8, help="blocks in a micro-batch (default: 8)")
    parser.add_argument("--block", type=int, default=1024, help="tokens in a block (default: 1024)")
    parser.add_argument("--capability", type=int, choices=SHARED, default=90, help="of the card (default: 90, H100)")
    parser.add_argument("--json", action="store_true", help="print a JSON list of all kernels on stdout")
    parser.add_debug()
    options = parser.parse_args()
    measure.require_positive(batch=options.batch, block=options.block)
    if lacks := gpu_cost.lacking_for("compiled"):
        raise UserError(f"{lacks} is not installed; {gpu_cost.INSTALL}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
    from research.counting import lowering

    _, graphs = lowering.count(Step(loading.default_config(), options.batch, options.block))
    found = kernels_of(graphs, options.capability)
    rows = [asdict(kernel) for kernel in found]
    shown = rows if options.json else [row | {"kernel": short(row["kernel"])} for row in rows[:SHOWN]]
    total, spill = sum(kernel.ms for kernel in found), sum(kernel.spilled > 0 for kernel in found)
    title = f"{len(found)} kernels, {total:.1f} ms of instructions a step, {spill} of them spill"
    measure.present(shown, COLUMNS, title, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
