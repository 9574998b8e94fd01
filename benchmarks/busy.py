#!/usr/bin/env python3
"""How fast training on a CPU is beside other processes that keep cores busy, against a free machine.

    python benchmarks/busy.py                     # free, beside one spinning process, beside three; in turns

Each measurement is a run of the embedded model in a process of its own, with nothing set: no OMP_NUM_THREADS, no
OMP_WAIT_POLICY. Beside the first number of processes a second run fixes one thread for each core (OMP_NUM_THREADS): the
difference is what looking at the cores costs. The machine must be free but for this.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure
from granite_scu.cli import exit_codes
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import RunFailed, UserError
from granite_scu.hardware.detection import CompetingLoad, allowed, detect

BUSY = 0.3
"""Cores that others may use at the start."""

COLUMNS = {
    "beside": "beside|d",
    "seconds": "time, s|.1f",
    "share_of_free": "of the free rate|.0%",
    "fixed_seconds": "threads fixed, s|.1f",
    "cores": "cores|d",
}


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """So many processes that compute without end, until the context is left."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def seconds_of(steps: int, threads: int | None) -> float:
    """The wall time of a run's steps and ticks, as its summary has it: loading and saving do not count.

    Args:
        steps: of the optimizer.
        threads: that are fixed; None leaves the number to the run.
    """
    free = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    fixed = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--test-run", "--max-steps", str(steps), "--target-s", "0.1", "--output-dir", folder + "/run"]
        line = [sys.executable, str(ROOT / "scripts" / "train_granite_cuda.py"), *flags]
        done = subprocess.run(line, env=free | fixed, capture_output=True, text=True)
        if done.returncode:
            raise RunFailed(f"the run ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
        return json.loads(Path(folder, "run", "scu_metrics.json").read_text(encoding="utf-8"))["train_time_s"]


def compare(beside: list[int], steps: int, repeats: int) -> list[dict]:
    """The median time beside each number of processes, and the rate as a share of that beside the first number."""
    kinds = [(beside[0], allowed()), *((count, None) for count in beside)]
    times: dict[tuple[int, int | None], list[float]] = {kind: [] for kind in kinds}
    for number in range(repeats):
        for count, threads in kinds if number % 2 == 0 else reversed(kinds):
            with spinning(count):
                times[count, threads].append(seconds_of(steps, threads))
            said = f"{times[count, threads][-1]:.1f} s" + (f" with {threads} threads" if threads else "")
            print(f"{number + 1}/{repeats} beside {count}: {said}", file=sys.stderr)
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    return [
        {
            "beside": count,
            "steps": steps,
            "seconds": medians[count, None],
            "share_of_free": medians[beside[0], None] / medians[count, None],
            "fixed_seconds": medians.get((count, allowed())),
            "runs": times[count, None],
            "fixed_runs": times.get((count, allowed())),
            "device": detect("cpu").name,
            "cores": allowed(),
        }
        for count in beside
    ]


def main() -> int:
    """Measure what the flags ask for and print it; returns the exit code."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--beside", type=int, nargs="+", default=[0, 1, 3], help="processes; the first is compared with"
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run (default: 60)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--json", action="store_true", help="print a JSON list on stdout, nothing else there")
    parser.add_debug()
    options = parser.parse_args()
    measure.require_positive(steps=options.steps, repeats=options.repeats)
    load = CompetingLoad()
    time.sleep(1)
    if (others := load.read()) > BUSY:
        raise UserError(f"other processes keep {others:.1f} cores busy; what is measured beside them means nothing")
    cases = compare(options.beside, options.steps, options.repeats)
    measure.present(cases, COLUMNS, f"{options.steps} steps beside others, {cases[0]['device']}", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
