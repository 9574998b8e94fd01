"""Whether a run can continue from its checkpoint: what must be the same, and what may differ and is named."""

import logging
from contextlib import suppress
from typing import Any

import lightning as L
from packaging.version import InvalidVersion, Version

from granite_scu.config import flags
from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import printable
from granite_scu.control import CONTROLLERS
from granite_scu.model import base_digest
from granite_scu.storage import manifest
from granite_scu.storage.provenance import versions
from granite_scu.storage.run_folder import TRAINING_CONFIG, RunFolder, read_if_there
from granite_scu.storage.working_folder import as_seen_from_here
from granite_scu.training.callbacks.checkpoints import Checkpoints, has_ended
from granite_scu.training.module import GraniteModule, check_adapters
from granite_scu.training.prepared_run import PreparedRun, build_module
from granite_scu.training.resume import TEXT, Resume, attribute_errors_to_checkpoint, holds_nan, later
from granite_scu.training.trainer import destroy_process_group, fit, kill_children, run_end_hooks

log = logging.getLogger(__name__)

CUTS_TEXT = (
    *("block_size", "packing", "on_long", "loss_on", "control_tokens", "record_format", "text_column", "encoding"),
    *("split_seed", "held_out_share", "weights"),
)
"""Settings of the data that make other blocks of the same text."""


def check_continued(run: PreparedRun, resume: Resume) -> None:
    """Refuse what must be the same as at the checkpoint and is not, and say what has changed.

    Raises:
        UserError: it is not the same, or no run can continue from the checkpoint.
    """
    with attribute_errors_to_checkpoint(resume):
        check_adapters(resume.state, run.size.trained)
        check_blocks(resume, run.course, run.data.checksum)
        build_module(run).require_same_settings(resume.state)
        check_resumable(run, resume)
        _warn_of_changes(resume, run.course)
        _warn_of_versions(resume)


def check_resumable(run: PreparedRun, resume: Resume) -> None:
    """Refuse what needs no model to be seen, before one is loaded.

    Raises:
        UserError: the checkpoint is of another controller, of a run that is finished, or not the newest of the run
            folder that it lies in.
    """
    law, steps = type(run.controller).__name__, run.length.steps
    where, own = f"--resume-from-checkpoint {resume.path}:", resume.control["name"]
    if own != law:
        kinds = {law.__name__: name for name, law in CONTROLLERS.items()}
        flag = kinds.get(own, f"package.module:{own}")
        raise UserError(f"{where} its controller is {kinds.get(own, own)}; resume with --controller {flag}")
    by_steps = run.request.data.num_epochs is None or run.request.trainer.max_steps == steps
    ends = "--max-steps" if by_steps else "--num-epochs"
    check_length(resume, steps, ends)
    if _has_finished(resume) and has_ended(resume.state, run.course):
        raise UserError(
            f"{where} the run ended there, at step {resume.step}, before {ends}; raise --max-time, "
            "--early-stopping or --stop-at-equilibrium, whichever ended it, to continue"
        )
    others = later(resume) if resume.in_place and not run.request.run.overwrite else []
    # They would belong to another run, and ``last`` would continue that one.
    if newer := [path.name for path in others if manifest.damage(path) is None]:
        raise UserError(
            f"{where} {newer[-1]} is newer; continue from that, or from here in another --output-dir, or drop what is "
            "newer with --overwrite"
        )


def check_length(resume: Resume, steps: int, ends: str) -> None:
    """Refuse a checkpoint that no step follows; ``ends`` is the flag by which the run has so many steps.

    Raises:
        UserError: the run is shorter, or as long and finished.
    """
    if resume.step > steps or (resume.step == steps and _has_finished(resume)):
        where = f"--resume-from-checkpoint {resume.path}:"
        raise UserError(f"{where} it is at step {resume.step} and the run ends at {steps}; raise {ends} to continue")


def _has_finished(resume: Resume) -> bool:
    return resume.in_place and RunFolder(resume.path.parent).finished


def check_blocks(resume: Resume, now: dict[str, Any], checksum: str) -> None:
    """Refuse other blocks of the text by the setting that makes them, or else the text itself.

    Args:
        resume: the checkpoint.
        now: the run's ``settings_that_affect_numbers``.
        checksum: of the run's blocks.

    Raises:
        UserError: they differ from the checkpoint's.
    """
    before = resume.state["settings"]
    if resume.state["frozen"].get(TEXT) == checksum:
        return
    for name in (flags.NAMES[f"data.{key}"] for key in CUTS_TEXT):
        if before.get(name, now[name]) != now[name]:
            was, is_now = ("the default" if value is None else value for value in (before[name], now[name]))
            raise UserError(
                f"--resume-from-checkpoint: {name} was {was} and is now {is_now}, which makes other blocks of the "
                "text; resume with the same"
            )
    raise UserError(
        f"--data-dir: the text is another one than that of {resume.path}, or --chat-template or --system makes another "
        "of it; resume with the same, or start from its adapter by --adapter"
    )


def check_base(resume: Resume, name: str) -> None:
    """Refuse a base model with other weights than the checkpoint's run had; ``name`` as ``--model`` has it.

    Raises:
        UserError: says what differs.
    """
    base_digest.check(_recorded(resume), f"--resume-from-checkpoint {resume.path}", name, refuse=True)


def _recorded(resume: Resume) -> dict[str, Any]:
    """What the checkpoint's run says of itself; nothing where the checkpoint was moved out of its folder."""
    return read_if_there(resume.path.parent / TRAINING_CONFIG)


def _warn_of_versions(resume: Resume) -> None:
    """Say that the run was made by a newer version, some of whose settings this one may not have, or computed by other
    versions of what it is made with, whose record this run's takes the place of."""
    before, now = _recorded(resume).get("versions") or {}, versions()
    others = [name for name in ("torch", "transformers", "peft") if before.get(name, now[name]) != now[name]]
    if others:
        named = ", ".join(f"{name} {printable(str(before[name]))} -> {now[name]}" for name in others)
        log.warning("other versions than the run had: %s; the result may differ", named)
    made_by, ours = before.get("granite-scu"), now["granite-scu"]
    with suppress(InvalidVersion, TypeError):  # a stranger's
        if made_by and Version(made_by) > Version(str(ours)):
            log.warning(
                "the run was made by granite-scu %s, which is newer than this %s and may do things in another way; "
                "pip install --upgrade granite-scu",
                *(made_by, ours),
            )


def _warn_of_changes(resume: Resume, now: dict[str, Any]) -> None:
    """Say which settings differ from the checkpoint's; ``now`` is the run's ``settings_that_affect_numbers``."""
    before = dict(resume.state["settings"])
    name = "--model"  # the same place, seen from another working folder
    if before.get(name) and as_seen_from_here(before[name], resume.path.parent) == now.get(name):
        before[name] = now[name]
    if before.get(n := flags.NAMES["prior.n_tokens"]) is None and now.get(n) == resume.state["frozen"].get(n):
        before[n] = now.get(n)  # of a stream, whose tokens nobody counted
    # What an earlier version has not recorded is not known to differ.
    if changed := [f"{n} {before[n]} -> {now[n]}" for n in now if n in before and before[n] != now[n]]:
        differs = "the result will differ from an uninterrupted run"
        log.warning("changed since the checkpoint: %s; %s", ", ".join(changed), differs)


def run_to_its_end(run: PreparedRun, trainer: L.Trainer, module: GraniteModule) -> None:
    """Train, or where no step is left only do what comes after the last.

    Raises:
        UserError: no run can continue from the checkpoint.
    """
    first_step = run.resume.step if run.resume else 0
    sound = run.resume is None or not holds_nan(run.resume.state)
    (saving,) = (each for each in trainer.callbacks if isinstance(each, Checkpoints))
    try:
        with attribute_errors_to_checkpoint(run.resume, lambda: sound and trainer.global_step > first_step):
            fit(trainer, module, run.data, run.resume and run.resume.path)
        if not saving.ended:  # a validation that the checkpoint owed may have ended it, without another step
            with attribute_errors_to_checkpoint(run.resume, lambda: sound):
                run_end_hooks(trainer, module)
    except BaseException:
        kill_children(trainer)
        raise
    destroy_process_group(trainer)
