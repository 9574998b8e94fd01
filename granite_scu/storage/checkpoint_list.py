"""The checkpoints of a run folder: which one is meant, which are whole, and which are old enough to go.

Imports nothing heavy: a checkpoint that is not there is refused at once.
"""

import logging
import shutil
from pathlib import Path

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import only_files
from granite_scu.storage import manifest
from granite_scu.storage.run_folder import ADAPTER_CONFIG, WEIGHTS, RunFolder

log = logging.getLogger(__name__)

STATE = "state.ckpt"

_WHOLE = (STATE, WEIGHTS, ADAPTER_CONFIG)
"""What a checkpoint is made of."""

LAST, AUTO = "last", "auto"
"""What ``--resume-from-checkpoint`` takes beside a folder: the newest checkpoint; the same, or a fresh start."""


def lies_in(folder: RunFolder, resume: str | None) -> bool:
    """Whether the checkpoint that ``--resume-from-checkpoint`` names is one of this run folder."""
    if resume in (LAST, AUTO):
        return bool(folder.checkpoints())
    return resume is not None and folder.path.resolve() == Path(resume).expanduser().resolve().parent


def check_there(folder: RunFolder, resume: str) -> None:
    """Refuse a ``--resume-from-checkpoint`` that names nothing. Reads no checkpoint.

    Raises:
        UserError: a folder that is no checkpoint, or ``last`` where there is none.
    """
    if resume == LAST and not folder.checkpoints():
        raise UserError(f"--resume-from-checkpoint {LAST}: {folder.path} holds no checkpoint; with {AUTO} in "
                        f"the place of {LAST} training starts from its beginning")  # fmt: skip
    if resume in (LAST, AUTO):
        return
    path = Path(resume).expanduser()
    if not (path / STATE).is_file():
        hint = f"; the newest of that run is {LAST} --output-dir {path}" if RunFolder(path).checkpoints() else ""
        raise UserError(f"--resume-from-checkpoint {resume}: is not a checkpoint folder (no {STATE} in it){hint}")


def find(folder: RunFolder, resume: str) -> Path | None:
    """The checkpoint folder that ``--resume-from-checkpoint`` names, whole to the last byte.

    Of ``last`` and ``auto`` it is the newest that is whole; those passed over are named in the log.

    Returns:
        None where ``auto`` finds no checkpoint.

    Raises:
        UserError: there is none, it is damaged, or holds a pipe.
    """
    check_there(folder, resume)
    if resume in (LAST, AUTO):
        return _newest(folder, resume)
    path = Path(resume).expanduser()
    only_files(path)
    if problem := manifest.damage(path, _WHOLE):
        raise UserError(f"--resume-from-checkpoint {resume}: {problem}; continue from another, or from the last "
                        f"intact one with --resume-from-checkpoint {LAST} --output-dir {path.parent}")  # fmt: skip
    return path


def _newest(folder: RunFolder, resume: str) -> Path | None:
    problems: list[str] = []
    for path in reversed(folder.checkpoints()):
        if (problem := manifest.damage(path, _WHOLE)) is None:
            for line in problems:
                log.warning("%s; continuing from %s instead", line, path.name)
            return path
        problems.append(f"{path.name}: {problem}")
    if problems:
        raise UserError(f"--resume-from-checkpoint {resume}: none in {folder.path} is intact ({'; '.join(problems)})")
    return None


def prune(folder: RunFolder, keep: int) -> None:
    """Remove the checkpoints that are older than the newest ``keep`` whole ones. A damaged one counts for nothing."""
    whole = 0
    for path in reversed(folder.checkpoints()):
        if whole >= keep:
            try:
                shutil.rmtree(path)
            except OSError as error:  # as where somebody reads it on a network file system: no reason to end a run
                log.warning("%s: could not be removed: %s", path, error.strerror)
        elif manifest.damage(path, _WHOLE) is None:
            whole += 1
