#!/usr/bin/env python3
"""A look into the steps of a run: what they wait for, and which kernels they spend their time in.

    python benchmarks/gpu_steps.py trace --device cpu
    python benchmarks/gpu_steps.py syncs --device cuda

``syncs`` trains with `--target-s 2%` and has PyTorch refuse every call that waits for the GPU, in micro-batches
between two ticks; the first steps, which compile and allocate, are left out. Under fp16 the loss scaler waits by
design. ``trace`` records some steps with PyTorch's profiler. Both print JSON, times in milliseconds a step.
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import lightning as L
import torch

from benchmarks import measure, training
from granite_scu.cli import exit_codes
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import RunFailed, UserError
from granite_scu.config.settings import DEFAULT_EVERY

FIRST = 3
"""Steps of a run that are not looked at."""

TRACED, SHOWN = 3, 10
GUARDED = 2 * DEFAULT_EVERY + 5
"""Steps of the run that may not wait: two ticks are among them."""

NAME = 90  # characters of a kernel's name; those of templates go on for lines


class Enough(BaseException):
    """Ends a run that has been looked at; scoring the held-out text would take longer."""


class NoWaiting(L.Callback):
    """Has PyTorch refuse to wait for the device, in micro-batches of steps that do not end in a tick.

    As the last callback it is in force from the start of such a step until all others are done with it, and over the
    transfer of the next micro-batch where that one is guarded too.

    Args:
        every: optimizer steps between ticks.
        steps: after which the run has been looked at.
        set_mode: ``torch.cuda.set_sync_debug_mode``.
    """

    def __init__(self, every: int, steps: int, set_mode: Callable[[str], None]) -> None:
        self.every, self.steps, self.set_mode = every, steps, set_mode
        self.guarded = 0

    def is_guarded(self, done: int) -> bool:
        """Whether the step after ``done`` steps may not wait."""
        return done >= FIRST and (done + 1) % self.every != 0

    def on_train_batch_start(self, trainer: L.Trainer, *rest: Any) -> None:
        if self.is_guarded(trainer.global_step):
            self.set_mode("error")
            self.guarded += 1

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if not self.is_guarded(trainer.global_step):
            self.set_mode("default")
        if trainer.global_step >= self.steps:
            self.set_mode("default")
            raise Enough

    def on_exception(self, *rest: Any) -> None:
        self.set_mode("default")  # a run that ends moves its model off the device, which waits


class Traced(L.Callback):
    """Records ``TRACED`` steps with the profiler."""

    def __init__(self, device: str) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(activities=activities)

    def on_train_batch_start(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step == FIRST:
            self.profile.start()

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step == FIRST + TRACED:
            self.profile.stop()
            raise Enough


def train(device: str, case: training.Case, steps: int, flags: tuple[str, ...], callback: L.Callback) -> None:
    """A run of granite-scu as a user starts it, until the callback has had enough."""
    console = training.quiet_console()
    from granite_scu.training.recipe import prepare, train

    with tempfile.TemporaryDirectory() as folder:
        request = training.make_request(device, case, steps, flags, folder)
        try:
            train(prepare(replace(request, trainer=replace(request.trainer, callbacks=[callback])), console))
        except Enough:
            return
    raise RunFailed("the run ended before it had been looked at")


def syncs(device: str, precision: str) -> dict[str, Any]:
    """Where a step waits for the device; null where none does."""
    if device != "cuda":
        raise UserError("syncs: a CPU is not waited for; use --device cuda")
    case = training.Case("embedded", precision, 8, 128)
    watch = NoWaiting(DEFAULT_EVERY, GUARDED, torch.cuda.set_sync_debug_mode)
    flags = ("--target-s", "2%", "--control-every", str(DEFAULT_EVERY), "--gradient-accumulation-steps", "2")
    waits = None
    try:
        train(device, case, GUARDED + 5, flags, watch)
    except RuntimeError as error:
        torch.cuda.set_sync_debug_mode("default")
        if "synchronizing" not in str(error):
            raise
        waits = where(error)
    return {"waits": waits, "guarded": watch.guarded, "precision": precision}


def where(error: Exception) -> str:
    """The innermost line of ours, and the innermost of all."""
    while isinstance(error.__context__, RuntimeError):  # the first one: others come of cleaning up
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "granite_scu" in Path(frame.filename).parts]
    named = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in (frames[-1], *ours[-1:])]
    return ", in ".join(dict.fromkeys(named))


def trace(device: str, case: training.Case) -> dict[str, Any]:
    """The kernels of a step by their own time; on a CPU, PyTorch's operators."""
    recorded = Traced(device)
    with training.model_folder(case.model, device) as name:
        case = replace(case, name=name)
        train(device, case, FIRST + TRACED + 5, ("--no-isolate-documents",), recorded)
    found = kernels(recorded.profile, device)
    total = sum(kernel["ms"] for kernel in found)
    longest = [{**kernel, "share": measure.ratio(kernel["ms"], total)} for kernel in found[:SHOWN]]
    return {"case": str(case), "steps": TRACED, "ms": total, "kernels": longest}


def kernels(profile: Any, device: str) -> list[dict[str, Any]]:
    """Name, calls a step and milliseconds a step of each, the longest first."""
    on_gpu = device == "cuda"
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    found = [
        {
            "name": event.key[:NAME],
            "calls": event.count / TRACED,
            "ms": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000 / TRACED,
        }
        for event in profile.key_averages()
        # What a program calls a stretch of its own is on the GPU's list too, over the kernels in it.
        if event.device_type == wanted and not (on_gpu and event.is_user_annotation)
    ]
    return sorted(found, key=lambda kernel: -kernel["ms"])


def main() -> int:
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("what", choices=("syncs", "trace"))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA when there")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: fp32")
    parser.add_argument(
        "--model", help=f"{', '.join(training.MODELS)}, or a folder (default: cut on CUDA, or embedded)"
    )
    parser.add_argument("--batch", type=int, help="sequences in a traced step (default: 2 of 1024 on CUDA, 8 of 128)")
    parser.add_debug()
    options = parser.parse_args()
    device = measure.resolve_device(options.device)
    # The scaler of fp16 reads its flag from the device in every step.
    precision = "fp32" if options.precision == "fp16" else options.precision
    if options.what == "syncs":
        found = syncs(device, precision)
    else:
        measure.require_positive(batch=options.batch)
        model, batch, length = ("cut", 2, 1024) if device == "cuda" else ("embedded", 8, 128)
        found = trace(device, training.Case(options.model or model, precision, options.batch or batch, length))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
