"""Continuing from a checkpoint: what must be the same, what may differ and is named, and where everything stands."""

import logging
import math
import shutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from granite_scu.config import flags
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.control import AUTO, CONTROLLERS, PI, AutoSetpoint
from granite_scu.hardware.machine import Machine
from granite_scu.model import base_digest
from granite_scu.storage import checkpoint, checkpoint_list, manifest
from granite_scu.storage.provenance import versions
from granite_scu.storage.run_folder import TRAINING_CONFIG, RunFolder, read_json, step_of
from granite_scu.storage.working_folder import as_seen_from_here
from granite_scu.training.callbacks.checkpoints import has_ended
from granite_scu.training.memory_budget import ran_out

log = logging.getLogger(__name__)

NO_INFLUENCE = {
    "lora": ("adapter",),
    "data": (
        "path",
        "cache_dir",
        "chat_template",
        "chat_template_args",
        "system",
        "num_workers",
        "prefetch_factor",
        "eval_batch_size",
        "num_epochs",
    ),
    "drift": ("general_data", "general_tokens"),
    "run": (
        "output_dir",
        "overwrite",
        "resume",
        "save_steps",
        "keep",
        "memory_fraction",
        "tf32",
        "multi_gpu",
        "gpus",
        "fsdp",
        "expected_mfu",
        "samples",
        "logger",
        "logger_offline",
    ),
}
"""Settings that change no number: where files lie and how fast it goes. The text itself, the chat template and
the adapter that training started from are compared by their checksums, and the length as a number of steps."""

CUTS_TEXT = (
    *("block_size", "packing", "on_long", "loss_on", "control_tokens", "record_format", "text_column", "encoding"),
    *("split_seed", "held_out_share", "weights"),
)
"""Settings of the data that make other blocks of the same text."""

TEXT = "the text of --data-dir (its checksum)"
"""By which a checkpoint knows the blocks that it was trained on."""

OF_THE_TRAINER = ("accumulate_grad_batches", "limit_val_batches", "deterministic", "max_time")


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


def holds_nan(state: Any) -> bool:
    """Whether one of the numbers of a state, outside of its tensors, is none: it may let a run fail at any time."""
    if isinstance(state, dict):
        return any(map(holds_nan, state.values()))
    if isinstance(state, list | tuple):
        return any(map(holds_nan, state))
    return isinstance(state, float) and math.isnan(state)


def open_checkpoint(resume: str | None, folder: Path) -> Resume | None:
    """What ``--resume-from-checkpoint`` names; None where it is not given, or ``auto`` finds nothing.

    Args:
        resume: the flag's value.
        folder: of the run that continues.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    path = checkpoint_list.find(resume, folder) if resume else None
    if path is None:
        return None
    state = checkpoint.load_state(path)
    checkpoint.check_state(state, path)
    return Resume(path, state, folder.resolve() in path.resolve().parents)


AS_BEFORE = (
    *("data.block_size", "data.on_long", "data.batch_size"),
    *("trainer.accumulate_grad_batches", "trainer.limit_val_batches"),
    *("optimizer.learning_rate", "optimizer.warmup_steps", "control.every", "control.controller", "run.eval_steps"),
    "drift.max_drift",
)
"""Settings that were fitted to the data, which a run that continues keeps."""


def as_before(request: Request, resume: Resume) -> Request:
    """The request with what is not given, of what was fitted to the data, as the checkpoint's run had it.

    Its length counts as given as well, unless steps or epochs are.

    Raises:
        UserError: the checkpoint has a value that its setting cannot have.
    """
    names = {flag.key: flag.name for section in flags.SECTIONS.values() for flag in section}
    has_length = request.trainer["max_steps"] > 0 or request.data.num_epochs is not None
    keys = [*AS_BEFORE, *(() if has_length else ("trainer.max_steps",))]
    before = resume.state["settings"]
    unset = [key for key in keys if key not in request.given]
    values = {key: value for key in unset if (value := before.get(names[key])) is not None}
    with blamed(resume):
        if any(not isinstance(value, float | int | str) or isinstance(value, bool) for value in values.values()):
            raise TypeError("a setting is no number")
        return replace(request.with_values(values), given=request.given | values.keys())


@contextmanager
def blamed(resume: Resume | None, has_begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Name the checkpoint where its state lets a run fail before that has begun.

    The state has hundreds of values, ours and of three libraries. Each is checked by who uses it, in errors of its own.

    Args:
        resume: the checkpoint, if there is one.
        has_begun: whether what fails now has another cause.

    Raises:
        UserError: in the place of an error that nobody has worded.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if resume is None or has_begun() or ran_out(error):
            raise
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise UserError(
            f"--resume-from-checkpoint {resume.path}: no run can continue from its state ({words}); name another"
        ) from error


def course_of(
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
    names = {flag.key: flag.name for section in flags.SECTIONS.values() for flag in section}
    found: dict[str, Any] = {"trainer.max_steps": steps, "trainer.precision": machine.precision}
    for group in flags.GROUPS:
        every = asdict(getattr(request, group))
        found |= {f"{group}.{k}": v for k, v in every.items() if k not in NO_INFLUENCE.get(group, ())}
    found |= {f"trainer.{name}": request.trainer[name] for name in OF_THE_TRAINER}
    found |= {"control.target_s": setpoint, "run.eval_steps": eval_steps, "seed_everything": request.seed}
    found |= {"device": machine.accelerator, "attention in use": machine.attention}
    found |= {"TF32 in use": machine.tf32}
    plain = int | float | str | bool | None
    return {names.get(key, key): value if isinstance(value, plain) else str(value) for key, value in found.items()}


def check_resumable(resume: Resume, law: str, steps: int, now: dict[str, Any], overwrite: bool) -> None:
    """Refuse what needs no model to be seen, before one is loaded.

    Args:
        resume: the checkpoint.
        law: class of the run's controller.
        steps: optimizer steps of the run.
        now: the run's ``course_of``.
        overwrite: whether later checkpoints may make way.

    Raises:
        UserError: the checkpoint is of another controller, of a run that is finished, or not the newest of the run
            folder that it lies in.
    """
    where, own = f"--resume-from-checkpoint {resume.path}:", resume.control["name"]
    if {own, law} == {PI.__name__, AutoSetpoint.__name__}:
        flag = AUTO if own == AutoSetpoint.__name__ else f"{resume.control['setpoint']:g}"
        how = "was found during the run" if flag == AUTO else f"is {flag}"
        raise UserError(f"{where} its setpoint {how}; resume with --target-s {flag}")
    if own != law:
        kinds = {law.__name__: name for name, law in CONTROLLERS.items()} | {AutoSetpoint.__name__: "pi"}
        flag = kinds.get(own, f"package.module:{own}")
        raise UserError(f"{where} its controller is {kinds.get(own, own)}; resume with --controller {flag}")
    finished = resume.in_place and RunFolder(resume.path.parent).finished
    if resume.step > steps or (resume.step == steps and finished):
        raise UserError(
            f"{where} it is at step {resume.step} and the run ends at {steps}; raise --max-steps to continue"
        )
    if finished and has_ended(resume.state, now):
        raise UserError(
            f"{where} the run ended there, at step {resume.step}, before --max-steps; raise --max-time, "
            "--early-stopping or --stop-at-equilibrium, whichever ended it, to continue"
        )
    later = _later(resume) if resume.in_place and not overwrite else []
    # They would belong to another run, and ``last`` would continue that one.
    if newer := [path.name for path in later if manifest.damage(path) is None]:
        raise UserError(
            f"{where} {newer[-1]} is newer; continue from that, or from here in another --output-dir, or drop what is "
            "newer with --overwrite"
        )


def check_blocks(resume: Resume, now: dict[str, Any], checksum: str) -> None:
    """Refuse other blocks of the text by the setting that makes them, where it is not the text itself.

    Args:
        resume: the checkpoint.
        now: the run's ``course_of``.
        checksum: of the run's blocks.

    Raises:
        UserError: they differ from the checkpoint's, and so does a setting or what a version holds out.
    """
    names = {flag.key: flag.name for section in flags.SECTIONS.values() for flag in section}
    before = resume.state["settings"]
    if resume.state["frozen"].get(TEXT) == checksum:
        return
    for name in (names[f"data.{key}"] for key in CUTS_TEXT):
        if before.get(name, now[name]) != now[name]:
            raise UserError(
                f"--resume-from-checkpoint: {name} was {before[name]} and is now {now[name]}, which makes other blocks "
                "of the text; resume with the same"
            )
    if names["data.held_out_share"] not in before:  # it is as old as that
        raise UserError(
            f"--resume-from-checkpoint {resume.path}: the text is another one, or an earlier version made it, which "
            "held out other conversations; resume with that version, or start from its adapter by --adapter"
        )


def check_base(resume: Resume, name: str) -> None:
    """Refuse a base model with other weights than the checkpoint's run had; ``name`` as ``--model`` has it.

    Raises:
        UserError: says what differs.
    """
    base_digest.check(_recorded(resume), f"--resume-from-checkpoint {resume.path}", name, refuse=True)


def _recorded(resume: Resume) -> dict[str, Any]:
    """What the checkpoint's run says of itself; nothing where the checkpoint was moved out of its folder."""
    file = resume.path.parent / TRAINING_CONFIG
    return read_json(file) if file.is_file() else {}


def warn_of_newer(resume: Resume) -> None:
    """Say that the run was made by a newer version, some of whose settings this one may not have."""
    made_by, ours = (found.get("granite-scu") for found in (_recorded(resume).get("versions") or {}, versions()))
    with suppress(InvalidVersion, TypeError):  # a stranger's
        if made_by and Version(made_by) > Version(str(ours)):
            log.warning(
                "the run was made by granite-scu %s, which is newer than this %s and may do things in another way; "
                "pip install --upgrade granite-scu",
                *(made_by, ours),
            )


def warn_of_changes(resume: Resume, now: dict[str, Any]) -> None:
    """Say which settings differ from the checkpoint's; ``now`` is the run's ``course_of``."""
    before = dict(resume.state["settings"])
    for name in ("--model", "--replay"):  # the same place, seen from another working folder
        if before.get(name) and as_seen_from_here(before[name], resume.path.parent) == now.get(name):
            before[name] = now[name]
    if changed := [f"{name} {before.get(name)} -> {value}" for name, value in now.items() if before.get(name) != value]:
        differs = "the result will differ from an uninterrupted run"
        log.warning("changed since the checkpoint: %s; %s", ", ".join(changed), differs)


def _later(resume: Resume) -> list[Path]:
    """The checkpoints after it in its folder, oldest first."""
    return [path for path in RunFolder(resume.path.parent).checkpoints() if step_of(path) > resume.step]


def restore_records(folder: RunFolder, resume: Resume, drop_later: bool) -> None:
    """Continue the records up to the checkpoint; from a new folder, with those of the checkpoint's own.

    In its own folder what came after it makes way, newest first: ``last`` works wherever this is cut short.
    """
    if resume.in_place and drop_later:
        for path in reversed(_later(resume)):
            shutil.rmtree(path)
    if not resume.in_place:
        for record in RunFolder(resume.path.parent).read_history():
            folder.append_history(record)
    kept = folder.truncate_history(resume.control["latest"].get("step", 0))  # 0: it was saved before the first tick
    if kept != (ticks := resume.control["ticks"]):
        log.warning("the history holds %d of the checkpoint's %d ticks; the pictures will have a gap", kept, ticks)
