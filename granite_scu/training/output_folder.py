"""The run folder at the start of a run: who may have it, what makes way, and what is written first."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from granite_scu.config.request import Request
from granite_scu.errors import UserError
from granite_scu.storage import checkpoint
from granite_scu.storage.run_folder import DOCUMENTS, LOCK, TRAINING_CONFIG, RunFolder
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.resume import Resume, restore_records
from granite_scu.training.run_metadata import scu_config, training_config

LOG = "cuda_optimized_training.log"


def is_main() -> bool:
    """Whether this process writes the run folder: the only one, or the first of several."""
    return rank_zero_only.rank == 0


def continues_in(folder: RunFolder, resume: Resume | None) -> bool:
    """Whether the run continues in the folder that its checkpoint lies in, and not in a new one."""
    return resume is not None and folder.path.resolve() in resume.path.resolve().parents


def check_folder(folder: RunFolder, request: Request, resume: Resume | None) -> None:
    """Refuse a run folder that must not be written to. Makes and deletes nothing.

    Raises:
        UserError: it holds something else, another process runs in it, or clearing it would delete what the run reads.
    """
    in_place = continues_in(folder, resume)
    folder.check(_replaces(folder, resume, request.run.resume, request.run.overwrite), resuming=in_place)
    if (folder.path / LOCK).is_file():  # otherwise nobody has it, and a refusal leaves nothing behind
        folder.lock()
    if request.run.overwrite and not in_place:
        for flag, path in (
            *(("--data-dir", source) for source in request.data.sources),
            ("--model", request.base.name),
            ("--replay", request.control.replay),
            ("--adapter", request.lora.adapter),
        ):
            _refuse_to_delete(folder.path.resolve(), flag, path)


def _refuse_to_delete(folder: Path, flag: str, path: str | None) -> None:
    source = Path(path).expanduser().resolve() if path else None
    if source and source.exists() and folder in (source, *source.parents):
        raise UserError(f"--overwrite: would delete {flag} {path}, which lies in {folder}; move one of them")


def _replaces(folder: RunFolder, resume: Resume | None, asked: str | None, overwrite: bool) -> bool:
    """Whether a run that lies in the folder makes way: as was asked, or because it ended before a checkpoint."""
    begun = asked == checkpoint.AUTO and resume is None and not folder.trained
    return begun or (overwrite and not continues_in(folder, resume))


@contextmanager
def claimed(folder: RunFolder, request: Request, resume: Resume | None) -> Iterator[None]:
    """Keep other processes out of the folder, which is checked again: time has passed since it was.

    It is let go of at the end of a run that failed, too: a notebook's process continues, and may try again.
    """
    try:
        if is_main():
            check_folder(folder, request, resume)
        yield
    finally:
        folder.unlock()


def open_run_folder(run: PreparedRun) -> None:
    """Make the folder, clear it of what makes way, and write what says whose it is."""
    folder, request, resume = run.folder, run.request, run.resume
    folder.make()
    folder.lock()
    if _replaces(folder, resume, request.run.resume, request.run.overwrite):
        folder.clear()
    folder.sweep()
    folder.write_json(TRAINING_CONFIG, training_config(run))  # first: it says whose the rest is
    (folder.path / "logs").mkdir(exist_ok=True)
    folder.write_text("config.yaml", request.yaml)
    folder.write_json("scu_config.json", scu_config(run))
    folder.write_lines(DOCUMENTS, run.data.record())
    handler = logging.FileHandler(folder.path / "logs" / LOG, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("granite_scu").addHandler(handler)
    if resume:
        restore_records(folder, resume, continues_in(folder, resume), drop_later=request.run.overwrite)
