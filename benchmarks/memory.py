#!/usr/bin/env python3
"""The memory that training takes, predicted and measured.

    python benchmarks/memory.py --quick                     the embedded model, about a minute on two cores
    python benchmarks/memory.py --json > out.json           and ten blocks of Granite-4.0-H-1B at full width
    python benchmarks/memory.py --presets                   the micro-batches of the presets that fit this GPU
    python benchmarks/memory.py --model FOLDER              8 x 1024 tokens of a model, as a user trains it

Each case is a run in a process of its own; those of the presets are in one, of all forty blocks, uncompiled, and so
are those of ``--model``, with activations kept and recomputed. Measured
is the most that two optimizer steps take on top of what the process held before it loaded the model: of the CUDA
allocator, or resident in a CPU's memory. Libraries load what they need at their first use, so the process trains a
little first. Predicted is what ``--dry-run`` says, for the same flags.

On a CPU the processes are told to give freed blocks back (MALLOC_MMAP_THRESHOLD_). glibc keeps those below 32 MiB for
later, so that a process left to itself may hold half as much again as its tensors ever need at once.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure, training
from benchmarks.gate import GIB, Gate, race
from benchmarks.training import Case
from granite_scu.cli import exit_codes
from granite_scu.config.errors import RunFailed, UserError
from granite_scu.hardware import presets
from granite_scu.hardware.detection import MARGIN, Device, peak_memory, reset_peak_memory
from granite_scu.hardware.machine import SHORT_PRECISIONS, resolve_precision

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


def preset_cases(device: Device) -> list[tuple[Any, ...]]:
    """The micro-batches of the presets of all cards, each once, in precisions that a GPU has; the smallest first."""
    found = set()
    for name in presets.CARDS:
        card, settings = presets.card_of(name), presets.settings(name)
        asked = settings["trainer"].get("precision")
        precision = SHORT_PRECISIONS[resolve_precision(asked, card if asked else device)]
        flags = ["--torch-compile=off", "--gradient-checkpointing=off"]
        if settings.get("base", {}).get("quantize_4bit"):
            flags.append("--4bit-quantization")
        if rank := settings.get("lora", {}).get("rank"):
            flags.append(f"--lora-r={rank}")
        if precision != "bf16" or device.supports_bf16:
            sizes = settings["data"]["batch_size"], settings["data"]["block_size"]
            found.add(("whole", precision, *sizes, tuple(flags)))
    return sorted(found, key=lambda case: (case[2] * case[3], case))


def run_cases(cases: tuple[Flagged, ...], device: str, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Measure cases in one process, one after the other."""
    outcome = race({"run": (take_steps, (cases,))}, device, len(cases) - 1, advance)["run"]
    name = measure.detection.detect(device).name
    rows = []
    for number, flagged in enumerate(cases):
        report = outcome.reports[number] if number < len(outcome.reports) else {"taken_gb": None}
        predicted, measured = predict(flagged, device), report["taken_gb"]
        rows.append(
            {
                "case": str(flagged),
                "predicted_gb": predicted,
                "measured_gb": measured,
                "ratio": measure.ratio(predicted, measured),
                "reason": report.get("reason") or (outcome.reason if measured is None else None),
                "device": name,
            }
        )
    return rows


def predict(flagged: Flagged, device: str) -> float:
    """What the run is predicted to take, GiB."""
    from granite_scu.hardware import machine
    from granite_scu.training import memory_budget

    with tempfile.TemporaryDirectory() as folder:
        request = training.make_request(device, flagged.case, STEPS, flagged.flags, folder)
    found = machine.resolve_request(request)
    return memory_budget.predict(request, found).total / GIB


def room(device: str) -> float:
    """GiB of a device that a run may take."""
    return measure.detection.detect(device).memory_gb * (1 - MARGIN)


def take_steps(gate: Gate, cases: tuple[Flagged, ...]) -> None:
    """Runs of granite-scu as a user starts them; what each takes of memory is told at the gate."""
    import lightning as L
    import torch

    console = training.quiet_console()
    from granite_scu.training.recipe import prepare, train

    def fit(flagged: Flagged, callback: L.Callback) -> None:
        with tempfile.TemporaryDirectory() as folder:
            request = training.make_request(gate.device, flagged.case, STEPS, flagged.flags, folder)
            train(prepare(replace(request, trainer=replace(request.trainer, callbacks=[callback])), console))

    class Measured(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            reset_peak_memory(gate.device)  # what loading took is over

        def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
            if trainer.global_step == STEPS:
                most = peak_memory(gate.device)
                raise _Enough(most)  # scoring the held-out text would take much longer

    def most_of(flagged: Flagged) -> int | None:
        try:
            fit(flagged, Measured())
        except _Enough as enough:
            return enough.most
        raise RunFailed("it ended before its last step")

    def taken(flagged: Flagged) -> dict[str, Any]:
        gc.collect()
        torch.compiler.reset()  # else the layers would be compiled for shapes of any size, as no run of one shape is
        before = reset_peak_memory(gate.device)
        try:
            most = most_of(flagged)
        except (RunFailed, UserError, RuntimeError) as error:  # the others may be measured
            return {"taken_gb": None, "reason": str(error)}
        return {"taken_gb": None if most is None or before is None else (most - before) / GIB}

    first = cases[0]
    most_of(replace(first, case=replace(first.case, name=training.TINY_MODEL, batch=1, length=64)))
    report: dict[str, Any] = {}
    for flagged in cases:
        gate.wait(report.copy)
        report = taken(flagged)
    gate.wait(report.copy)


class _Enough(BaseException):
    """Ends a run that has been measured."""

    def __init__(self, most: int | None) -> None:
        self.most = most


def main() -> int:
    """Measure what the flags ask for and print it; returns the exit code."""
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(256 * 2**10))
    parser = measure.build_parser(str(__doc__), repeats=1, quick=1)
    parser.add_argument("--presets", action="store_true", help="the micro-batches of the presets that fit this GPU")
    parser.add_argument("--model", nargs="+", help=f"{', '.join(training.MODELS)}, or a folder")
    options = measure.parse(parser)
    if options.presets and options.device != "cuda":
        raise UserError("--presets: the presets are for GPUs, and there is none; leave it out")
    wanted = preset_cases(measure.detection.detect(options.device)) if options.presets else CASES
    if options.model:
        whole = ("--no-isolate-documents",)  # as train_step.py has it, whose graphs are then in the cache
        kept = whole, (*whole, "--gradient-checkpointing=on")
        wanted = [(model, "bf16", 8, 1024, flags) for model in options.model for flags in kept]
    wanted = QUICK if options.quick else wanted
    allowed = measure.usable(["fp32", "fp16", "bf16"], options.device)
    wanted = [case for case in wanted if case[1] in allowed]
    if find_spec("bitsandbytes") is None:
        print("cases in 4 bits left out: the package bitsandbytes is not installed", file=sys.stderr)
        wanted = [case for case in wanted if "--4bit-quantization" not in case[4]]
    with ExitStack() as stack:
        models = {case[0] for case in wanted}
        folders = {model: stack.enter_context(training.model_folder(model, options.device)) for model in models}
        cases = [Flagged(Case(*case[:4], name=folders[case[0]]), case[4]) for case in wanted]
        groups = {str(case): (case,) for case in cases}
        if options.presets or options.model:
            groups = {"all": tuple(case for case in cases if predict(case, options.device) <= room(options.device))}
            groups = {name: group for name, group in groups.items() if group}
        turns = 1 + max(map(len, groups.values()), default=0)
        measured = measure.measure_each(groups, turns, lambda name, tick: run_cases(groups[name], options.device, tick))
    found = [row for rows in measured for row in rows]
    measure.present(found, COLUMNS, "memory of training, predicted and measured", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
