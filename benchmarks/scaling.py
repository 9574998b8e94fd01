#!/usr/bin/env python3
"""One process against several on the same global batch: how much faster an optimizer step gets.

    python benchmarks/scaling.py --quick              two runs of each, about a minute on two cores
    python benchmarks/scaling.py --json > out.json    five of each

Both sides are the training script as users start it, on the embedded model: one process with a global batch, and
``--processes`` of them under torchrun that share it. On a CPU every process has one thread, so that a process more is a
core more. The sides take turns; ``one_s`` and ``several_s`` are medians over the turns of the mean time of a step
(``train_time_s`` over steps: start, validation and scoring do not count), ``efficiency`` is the speedup over the
number of processes. Both end with the same S but for rounding, see ``s_differs``.

``reduced_bytes`` is what every process puts into the all-reduce of a step: the adapters' gradients in fp32. The sums
that S is measured from come on top, ``sums_bytes`` a step.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure
from granite_scu.cli import exit_codes
from granite_scu.config.errors import RunFailed, UserError

SCRIPT = ROOT / "scripts" / "train_granite_cuda.py"
STEPS = 60
GLOBAL_BATCH = 8
FLAGS = (
    *("--test-run", "--max-steps", STEPS, "--eval-steps", STEPS, "--eval-iters", 1, "--save-steps", STEPS),
    *("--logging-steps", STEPS),
)
SUMS_BYTES = 8 * 2
"""Two float64: nats and supervised tokens of a window."""

COLUMNS = {
    "case": "case", "one_s": "one process, s/step|.4f", "several_s": "several|.4f", "speedup": "speedup|.2f",
    "efficiency": "efficiency|.0%", "reduced_bytes": "reduced a step, bytes|,", "s_differs": "S differs|.0e",
}  # fmt: skip


def run(processes: int, folder: Path, device: str) -> dict[str, Any]:
    """Train once; returns the mean time of a step in seconds, the last S, and the bytes of the adapter."""
    own = ("--batch-size", GLOBAL_BATCH // processes, "--output-dir", folder, "--overwrite")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    several = ["--multi-gpu"] if processes > 1 else []
    line = [sys.executable, *launcher, str(SCRIPT), *map(str, (*FLAGS, *own)), "--accelerator", device, *several]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(f"a run of {processes} processes failed: {done.stderr[-2000:]}")
    summary = json.loads((folder / "scu_metrics.json").read_text())
    adapter = (folder / "adapter_model.safetensors").stat().st_size
    return {"seconds": summary["train_time_s"] / summary["steps"], "s": summary["s"], "adapter_bytes": adapter}


def run_case(processes: int, device: str, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Both sides in turn, ``repeats`` times."""
    sides: dict[int, list[dict]] = {1: [], processes: []}
    with tempfile.TemporaryDirectory() as place:
        for _ in range(repeats):
            for count, found in sides.items():
                found.append(run(count, Path(place) / f"of-{count}", device))
            advance()
    one, several = (statistics.median(each["seconds"] for each in found) for found in sides.values())
    ends = [found[0]["s"] for found in sides.values()]
    return {
        "case": f"embedded model, {GLOBAL_BATCH} blocks a step, {processes} processes",
        "processes": processes,
        "one_s": one,
        "several_s": several,
        "speedup": one / several,
        "efficiency": one / several / processes,
        "reduced_bytes": sides[1][0]["adapter_bytes"],
        "sums_bytes": SUMS_BYTES,
        "s_differs": abs(ends[1] - ends[0]) / ends[0],
        "cores": os.cpu_count(),
    }


def main() -> int:
    parser = measure.build_parser(str(__doc__), repeats=5, quick=2)
    parser.add_argument("--processes", type=int, default=2, help="that share the batch (default: 2)")
    options = measure.parse(parser)
    if options.processes < 2 or GLOBAL_BATCH % options.processes:
        raise UserError(f"--processes {options.processes}: must be 2 or more and divide the batch of {GLOBAL_BATCH}")
    options.turns = options.repeats
    found = measure.measure_each(
        [options.processes],
        options.turns,
        lambda case, advance: run_case(case, options.device, options.repeats, advance),
    )
    measure.present(found, COLUMNS, "one process and several", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
