#!/usr/bin/env python3
"""The memory that training takes, predicted and measured.

    python benchmarks/memory.py --quick                     the embedded model, about a minute on two cores
    python benchmarks/memory.py --json > out.json           and ten blocks of Granite-4.0-H-1B at full width

Each case is a run in a process of its own. Measured is the most that two optimizer steps take on top of what the
process held before it loaded the model: of the CUDA allocator, or resident in a CPU's memory. Libraries load what they
need at their first use, so the process trains a little first. Predicted is what ``--dry-run`` says, for the same flags.

On a CPU the processes are told to give freed blocks back (MALLOC_MMAP_THRESHOLD_). glibc keeps those below 32 MiB for
later, so that a process left to itself may hold half as much again as its tensors ever need at once.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure, training
from benchmarks.gate import GIB, Gate, race
from benchmarks.training import Case
from granite_scu.cli import guard
from granite_scu.config.errors import RunFailed
from granite_scu.hardware.measuring import peak_memory, reset_peak_memory

STEPS = 2
"""Adam has its moments after the first."""

QUICK = (
    ("embedded", "fp32", 16, 256, ()),
    ("embedded", "fp32", 32, 256, ("--gradient-checkpointing",)),
    ("embedded", "fp32", 32, 256, ("--4bit-quantization",)),
    ("embedded", "bf16", 32, 256, ("--lora-r=64",)),
)
CASES = (
    *QUICK,
    ("embedded", "bf16", 16, 256, ()),
    ("embedded", "bf16", 8, 1024, ("--gradient-checkpointing",)),
    ("cut", "bf16", 2, 512, ()),
    ("cut", "bf16", 4, 512, ()),
    ("cut", "bf16", 2, 1024, ("--gradient-checkpointing",)),
    ("cut", "bf16", 2, 512, ("--lora-r=128",)),
    ("cut", "bf16", 2, 512, ("--4bit-quantization",)),
    ("cut", "fp32", 1, 512, ()),
)
COLUMNS = {
    "case": "case",
    "predicted_gb": "predicted GiB|.3f",
    "measured_gb": "measured GiB|.3f",
    "ratio": "predicted / measured|.3f",
    "reason": "reason",
}


@dataclass(frozen=True)
class Flagged:
    """A case and the further flags of its run."""

    case: Case
    flags: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([str(self.case), *self.flags])


def run_case(flagged: Flagged, device: str, advance: Callable[[], None]) -> dict[str, Any]:
    """Predict, then measure."""
    predicted = predict(flagged, device)
    outcome = race({"run": (take_steps, (flagged,))}, device, 0, advance)["run"]
    measured = None if outcome.reason else outcome.reports[-1]["taken_gb"]
    return {
        "case": str(flagged),
        "predicted_gb": predicted,
        "measured_gb": measured,
        "ratio": measure.ratio(predicted, measured),
        "reason": outcome.reason,
        "device": measure.hardware.detect(device).name,
    }


def predict(flagged: Flagged, device: str) -> float:
    """What the run is predicted to take, GiB."""
    from granite_scu.hardware import machine
    from granite_scu.training import memory_budget

    with tempfile.TemporaryDirectory() as folder:
        request = training.make_request(device, flagged.case, STEPS, flagged.flags, folder)
    found = machine.resolve(request.base, request.run, request.trainer)
    return memory_budget.predict(request, found).total / GIB


def take_steps(gate: Gate, flagged: Flagged) -> None:
    """A run of granite-scu as a user starts it; what it takes of memory is told at the gate."""
    import lightning as L
    import torch

    console = training.quiet_console()
    from granite_scu.training.recipe import prepare, train

    def fit(case: Case, callback: L.Callback) -> None:
        with tempfile.TemporaryDirectory() as folder:
            request = training.make_request(gate.device, case, STEPS, flagged.flags, folder)
            train(prepare(replace(request, trainer={**request.trainer, "callbacks": [callback]}), console))

    class Measured(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            reset_peak_memory(gate.device)  # what loading took is over

        def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
            if trainer.global_step == STEPS:
                most = peak_memory(gate.device)
                raise _Enough(most)  # scoring the held-out text would take much longer

    def most_of(case: Case) -> int | None:
        try:
            fit(case, Measured())
        except _Enough as enough:
            return enough.most
        raise RunFailed("it ended before its last step")

    most_of(replace(flagged.case, name=training.TINY_MODEL, batch=1, length=64))
    torch.compiler.reset()  # else the layers would be compiled for shapes of any size, as no run of one shape is
    before = reset_peak_memory(gate.device)
    gate.wait()
    most = most_of(flagged.case)
    taken = None if most is None or before is None else (most - before) / GIB
    gate.wait(lambda: {"taken_gb": taken})


class _Enough(BaseException):
    """Ends a run that has been measured."""

    def __init__(self, most: int | None) -> None:
        self.most = most


def main() -> int:
    """Measure what the flags ask for and print it; returns the exit code."""
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(256 * 2**10))
    parser = measure.build_parser(str(__doc__), repeats=1, quick=1)
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: %(default)s)")
    options = measure.parse(parser)
    measure.require_positive(jobs=options.jobs)
    wanted = QUICK if options.quick else CASES
    allowed = measure.usable(["fp32", "bf16"], options.device)
    wanted = [case for case in wanted if case[1] in allowed]
    with ExitStack() as stack:
        models = {case[0] for case in wanted}
        folders = {model: stack.enter_context(training.model_folder(model, options.device)) for model in models}
        cases = [Flagged(Case(*case[:4], name=folders[case[0]]), case[4]) for case in wanted]
        found = measure.measure_each(
            cases, 2, lambda case, advance: run_case(case, options.device, advance), options.jobs
        )
    measure.present(found, COLUMNS, "memory of training, predicted and measured", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(guard.guarded(main, "--debug" in sys.argv, guard.NOTHING_KEPT))
