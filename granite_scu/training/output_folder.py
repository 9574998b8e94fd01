"""The run folder at the start of a run: who may have it, what makes way, and what is written first."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from logging.handlers import MemoryHandler
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from granite_scu.config import flags
from granite_scu.config.errors import Stopped, UserError, one_line
from granite_scu.control.laws.base import as_stored
from granite_scu.data.tokens.chat import answer_end
from granite_scu.model import base_digest, loading
from granite_scu.storage import checkpoint_list, working_folder
from granite_scu.storage.atomic import adding_to, ensure_folder, replacing
from granite_scu.storage.provenance import git_revision, versions
from granite_scu.storage.run_folder import DOCUMENTS, LOCK, LOG_FILES, TRAINING_CONFIG, read_if_there
from granite_scu.training.defaults import RATE_WIDTH, rate_by_width
from granite_scu.training.early_checks import check_folder, makes_way
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.resume import restore_records

LINE = "%(asctime)s %(levelname)s %(message)s"
"""What a line of it looks like."""


def is_main() -> bool:
    """Whether this process writes the run folder: the only one, or the first of several."""
    return rank_zero_only.rank == 0


@contextmanager
def locked_run_folder(run: PreparedRun) -> Iterator[None]:
    """Keep other processes out of the folder, which is checked again: time has passed since it was.

    It is let go of at the end of a run that failed, too, and so is the log file that the run has added: a notebook's
    process continues, and may try again. A run that fails before it writes there leaves nothing behind.

    Raises:
        UserError: the folder must not be written to, or has checkpoints by now that the run was to continue from.
    """
    folder, resume = run.folder, run.request.run.resume
    ours = logging.getLogger("granite_scu")
    before, lock = list(ours.handlers), folder.path / LOCK
    made: list[Path] = []
    try:
        if is_main():
            check_folder(folder, run.request)
            missing = [path for path in (lock, folder.path) if not path.exists()]
            ensure_folder(folder.path)
            folder.lock()
            made = missing
            if run.resume is None and checkpoint_list.lies_in(folder, resume):
                raise UserError(
                    f"--resume-from-checkpoint {resume}: {folder.path} has checkpoints since this run was prepared; "
                    "prepare it again to continue from the last"
                )
        yield
    except BaseException as error:
        _log_end(error, [handler for handler in ours.handlers if handler not in before])
        raise
    finally:
        logs = [handler for handler in ours.handlers if handler not in before]
        for handler in logs:
            ours.removeHandler(handler)
            handler.close()
        folder.unlock()
        if not logs:  # it failed before it wrote there
            with suppress(OSError):
                for path in made:
                    path.rmdir() if path.is_dir() else path.unlink()


@contextmanager
def logged_from_here() -> Iterator[None]:
    """Keep messages from before there is a run folder for the log file in it; a run that is refused has neither."""
    ours = logging.getLogger("granite_scu")
    kept = MemoryHandler(capacity=10**6, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    kept.setFormatter(logging.Formatter(LINE))
    ours.addHandler(kept)
    try:
        yield
    finally:
        ours.removeHandler(kept)


def _log_end(error: BaseException, files: list[logging.Handler]) -> None:
    """Write into the log file why a run ends before its end; the console is told by whoever started it."""
    if isinstance(error, OSError):  # as a rule a disk without room for it
        return
    level = logging.INFO if isinstance(error, Stopped | KeyboardInterrupt) else logging.ERROR
    words = one_line(error)
    for handler in files:
        handler.handle(logging.LogRecord(__name__, level, __file__, 0, words, None, None))


def _open_log(file: Path) -> None:
    """Log to a file from now on, after what was kept for it."""
    ours, handler = (
        logging.getLogger("granite_scu"),
        logging.FileHandler(file, encoding="utf-8", errors="backslashreplace"),
    )
    handler.setFormatter(logging.Formatter(LINE))
    for kept in [each for each in ours.handlers if isinstance(each, MemoryHandler)]:
        ours.removeHandler(kept)
        handler.setFormatter(kept.formatter)
        kept.setTarget(handler)
        kept.flush()
    ours.addHandler(handler)


def _own_logs(folder: Path) -> None:
    """Have each file that is written on in place to this run alone: a copy by hard links shares it with another."""
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.stat().st_nlink > 1:
            with replacing(file) as temporary:
                shutil.copyfile(file, temporary)


def open_run_folder(run: PreparedRun) -> None:
    """Clear the folder, which is locked, of what makes way, and write what says whose it is."""
    folder, request, resume = run.folder, run.request, run.resume
    folder.sweep()  # first: what it puts back may be what is kept
    if makes_way(folder, request.run):
        folder.clear()
    folder.write_json(TRAINING_CONFIG, training_config(run))  # first: it says whose the rest is
    (folder.path / "logs").mkdir(exist_ok=True)
    # Without what was asked of this start alone: whoever gives the file with --config asks for another.
    folder.write_text("config.yaml", request.with_values({"run.resume": None, "run.overwrite": False}).stored)
    folder.write_json("scu_config.json", scu_config(run))
    folder.write_lines(DOCUMENTS, run.data.record())
    with adding_to(folder.path) as beside:
        loading.save_tokenizer(run.tokenizer, beside)  # now: its chat template is also that of a run which does not end
    _own_logs(folder.path / "logs")
    _open_log(folder.path / LOG_FILES[run.machine.accelerator])
    if resume:
        restore_records(folder, resume, drop_later=request.run.overwrite)


def scu_config(run: PreparedRun) -> dict:
    """The controller as it starts, and what it measures: ``scu_config.json``."""
    config = run.request.control
    return {
        "controller": config.controller,
        "target_s": run.setpoint,
        "lambda_start": run.controller.lambda_start,  # what acts before the first record of the history
        **as_stored(asdict(run.controller)),
        "control_every": config.every,
        "measure": config.measure,
        "actuator": config.actuator,
        "prior_sigma": run.request.prior.sigma,
        "n_tokens": run.length.n_tokens,
    }


def _given(run: PreparedRun) -> list[str]:
    """Dotted keys that the user gave a value. A run that continues reads its whole file, with what its data decided and
    with defaults: of values that are as they were, those count that counted then."""
    request, before = run.request, read_if_there(run.resume.path.parent / TRAINING_CONFIG) if run.resume else {}
    was_given = before.get("given")
    if not isinstance(was_given, list):
        return sorted(request.given)

    def is_kept(key: str) -> bool:
        group, _, name = key.partition(".")
        values = before.get(group)
        return isinstance(values, dict) and name in values and values[name] == getattr(getattr(request, group), name)

    return sorted(key for key in request.given if key in was_given or not is_kept(key))


def training_config(run: PreparedRun) -> dict:
    """Settings, plan, data, machine and versions: ``training_config.json``."""
    request, config = run.request, loading.load_model_config(run.request.base.name)
    end = answer_end(run.tokenizer)
    return {
        **{name: asdict(getattr(request, name)) for name in flags.GROUPS},
        **({"start": run.start.record()} if run.start else {}),
        "trainer": {k: v for k, v in vars(request.trainer).items() if isinstance(v, str | int | float | None)},
        "seed": request.seed,
        "answer_end": run.tokenizer.convert_ids_to_tokens(end) if end is not None else None,
        "changed": request.changed,
        "given": _given(run),
        "hardware_preset": request.hardware,
        "plan": asdict(run.length),
        "model_type": config.model_type,
        "rate_by_width": rate_by_width(getattr(config, "hidden_size", 0) or RATE_WIDTH),
        "data_summary": run.data.summary(),
        "machine": asdict(run.machine),
        "versions": versions(),
        "git_revision": git_revision(),
        base_digest.RECORDED: base_digest.record(request.base.name),
        working_folder.RECORDED: working_folder.record(run.folder.path),
    }
