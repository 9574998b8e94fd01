"""The checkpoint that a run continues from: what it says, what it keeps, and where everything stands."""

import logging
import math
import shutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from granite_scu.config import flags
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.hardware import detection
from granite_scu.hardware.machine import Machine
from granite_scu.storage import checkpoint, checkpoint_list
from granite_scu.storage.run_folder import CSV_LOG, RunFolder, csv_legs, step_of
from granite_scu.training.defaults import FITTED
from granite_scu.training.memory_budget import ran_out

log = logging.getLogger(__name__)

TEXT = "the text of --data-dir (its checksum)"
"""By which a checkpoint knows the blocks that it was trained on."""

FILES = "the files of --data-dir (a checksum of their names and sizes)"
"""By which one of a stream knows them: of its blocks it has those of the beginning alone."""


@dataclass(frozen=True)
class Resume:
    """A whole checkpoint.

    Attributes:
        path: its folder.
        state: what the folder holds beside the adapter.
        in_place: whether the run continues in the run folder that it lies in, and not in a new one.
    """

    path: Path
    state: dict[str, Any]
    in_place: bool

    @property
    def step(self) -> int:
        """Optimizer steps that were taken."""
        return self.state["global_step"]

    @property
    def control(self) -> dict[str, Any]:
        """The state of ``ShannonControl``."""
        return self.state["callbacks"]["ShannonControl"]

    @property
    def general(self) -> str | None:
        """``GeneralText.digest`` of the text that drift is held on; None where none is."""
        return self.state["callbacks"].get("DriftMeter", {}).get("general")


def holds_nan(state: Any) -> bool:
    """Whether one of the numbers of a state, outside of its tensors, is none: it may let a run fail at any time."""
    if isinstance(state, dict):
        return any(map(holds_nan, state.values()))
    if isinstance(state, list | tuple):
        return any(map(holds_nan, state))
    return isinstance(state, float) and math.isnan(state)


def open_checkpoint(folder: RunFolder, resume: str | None) -> Resume | None:
    """What ``--resume-from-checkpoint`` names; None where it is not given, or ``auto`` finds nothing.

    Args:
        folder: of the run that continues.
        resume: the flag's value.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    path = checkpoint_list.find(folder, resume) if resume else None
    if path is None:
        return None
    state = checkpoint.load_state(path)
    checkpoint.check_state(state, path)
    return Resume(path, state, checkpoint_list.lies_in(folder, resume))


FOUND = "data.batch_size", "trainer.accumulate_grad_batches"
"""What ``--auto-batch-size`` finds."""

VALIDATED = "blocks of a validation (--eval-iters)"
"""What two validations are compared by, whatever their batches."""

AS_BEFORE = (*FITTED, "control.controller", "control.target_s", "data.on_long", "drift.max_drift")
"""Settings that a run which continues keeps."""


def with_checkpoint_settings(request: Request, resume: Resume) -> Request:
    """The request with what is not given, of what was fitted to the data, as the checkpoint's run had it.

    Its length counts as given as well, unless steps or epochs are.

    Raises:
        UserError: the checkpoint has a value that its setting cannot have.
    """
    has_length = request.trainer.max_steps > 0 or request.data.num_epochs is not None
    keys = [*AS_BEFORE, *(() if has_length else ("trainer.max_steps",))]
    before = resume.state["settings"]
    if _measures_precision(request, before):
        keys.append("trainer.precision")
    searched = FOUND if request.run.auto_batch_size else ()  # the batch that was found sets the place in the data
    unset = [key for key in keys if key not in request.given or key in searched]
    values = {key: value for key in unset if (value := before.get(flags.NAMES[key])) is not None}
    with attribute_errors_to_checkpoint(resume):
        if "trainer.limit_val_batches" in unset and VALIDATED in before:  # as much of the text
            at_once = request.data.eval_batch_size or values.get("data.batch_size", request.data.batch_size)
            values["trainer.limit_val_batches"] = math.ceil(before[VALIDATED] / at_once)
        if any(not isinstance(value, float | int | str) or isinstance(value, bool) for value in values.values()):
            raise TypeError("a setting is no number")
        request = replace(request.with_values(values), given=request.given | values.keys())
        request = request.with_values({"run.auto_batch_size": False})
        if request.data.stream and request.prior.n_tokens is None:  # counted by the steps planned at its start
            request = request.with_values({"prior.n_tokens": int(resume.state["frozen"]["--n-tokens"])})
        return request


def _measures_precision(request: Request, before: dict[str, Any]) -> bool:
    """Whether a CPU would measure again what a CPU has chosen, and has that."""
    here, chosen = request.trainer.accelerator, before.get(flags.NAMES["trainer.precision"])
    return here == before.get("device") == "cpu" and (chosen != "bf16-mixed" or detection.detect(here).supports_bf16)


_OF_A_DEVICE: Any = getattr(torch, "AcceleratorError", ())
"""A GPU's own fault, since PyTorch 2.8."""


@contextmanager
def attribute_errors_to_checkpoint(
    resume: Resume | None, has_begun: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Name the checkpoint where its state lets a run fail before that has begun.

    The state has hundreds of values, ours and of three libraries. Each is checked by who uses it, in errors of its own.

    Args:
        resume: the checkpoint, if there is one.
        has_begun: whether what fails now has another cause; where all is at work, and not the state alone looked at.

    Raises:
        UserError: in the place of an error that nobody has worded.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if resume is None or (has_begun and has_begun()) or ran_out(error) or isinstance(error, _OF_A_DEVICE):
            raise
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        said = f"its state is corrupt ({words}); name another" if has_begun is None else (
            f"failed before its first step ({words}); if another checkpoint fails alike, its state is not the cause; "
            "--debug shows where"
        )  # fmt: skip
        raise UserError(f"--resume-from-checkpoint {resume.path}: {said}") from error


def settings_that_affect_numbers(
    request: Request, machine: Machine, steps: int, setpoint: float | None, eval_steps: int
) -> dict[str, Any]:
    """What the course of a run depends on, by the flag of the script that sets it or else by its dotted key.

    Args:
        request: what was asked for.
        machine: what it runs on.
        steps: optimizer steps of the run.
        setpoint: that its controller holds.
        eval_steps: optimizer steps between validations.
    """
    found: dict[str, Any] = {"trainer.max_steps": steps, "trainer.precision": machine.precision}
    for group in (*flags.GROUPS, "trainer"):
        asked = getattr(request, group)
        found |= {f"{group}.{name}": value for name, value in vars(asked).items() if name not in asked.NO_INFLUENCE}
    found |= {"control.target_s": setpoint, "run.eval_steps": eval_steps, "seed_everything": request.seed}
    found |= {"device": machine.accelerator, "attention in use": machine.attention}
    found |= {"TF32 in use": machine.tf32}
    found[VALIDATED] = found.pop("trainer.limit_val_batches") * (
        request.data.eval_batch_size or request.data.batch_size
    )
    plain, names = int | float | str | bool | None, flags.NAMES
    return {names.get(key, key): value if isinstance(value, plain) else str(value) for key, value in found.items()}


def later(resume: Resume) -> list[Path]:
    """The checkpoints after it in its folder, the oldest first."""
    return [path for path in RunFolder(resume.path.parent).checkpoints() if step_of(path) > resume.step]


def restore_records(folder: RunFolder, resume: Resume, drop_later: bool) -> None:
    """Continue the records up to the checkpoint; from a new folder, with those of the checkpoint's own.

    In its own folder what came after it makes way, newest first: ``last`` works wherever this is cut short.
    """
    source = RunFolder(resume.path.parent)
    if resume.in_place and drop_later:
        for path in reversed(later(resume)):
            shutil.rmtree(path)
    if not resume.in_place:
        for record in source.read_history():
            folder.append_history(record)
        for _, leg in csv_legs(source.path):
            if (leg / CSV_LOG).is_file():
                (there := folder.path / leg.relative_to(source.path)).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(leg / CSV_LOG, there / CSV_LOG)
    for begun, leg in csv_legs(folder.path):
        if begun > resume.step:  # this run does again what it did
            shutil.rmtree(leg)
    kept = folder.truncate_history(resume.control["latest"].get("step", 0))  # 0: it was saved before the first tick
    if kept != (ticks := resume.control["ticks"]):
        log.warning("the history holds %d of the checkpoint's %d ticks; the pictures will have a gap", kept, ticks)
