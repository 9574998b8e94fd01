"""The run folder: who may write into it, and what lies where."""

import json
import math
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from granite_scu.config.errors import UserError
from granite_scu.config.settings import LOGGERS
from granite_scu.config.untrusted_input import only_files, parse_json, printable, read_file, short_int
from granite_scu.storage.atomic import UNFINISHED, remove, replacing, sweep, sync

HISTORY = "scu_history.json"
HISTORY_LINES = "scu_history.jsonl"
METRICS = "scu_metrics.json"
DOCUMENTS = "documents.json"
CSV_LOG = "metrics.csv"
"""Which documents were trained on, validated on and held out, by digest."""
EVALUATION = "eval_bpt.json"
"""What ``granite-scu eval`` found of the finished run."""
CONTROL_CONFIG = "scu_config.json"
SAMPLES = "samples.json"
"""What base model and adapter make of two test documents, where these are no chats."""
ANSWERS, ELSEWHERE = "answers.json", "elsewhere.json"
"""What both answer to the questions of held-out chats, and to general ones."""
GENERAL, GENERAL_SCHEMA = "general.jsonl", "granite-scu general text 1"
"""The general text that drift is measured on, and what its first line begins with; a run that is continued, and
``granite-scu eval``, read it."""
STOPPED = "stopped.json"
"""Which signal stopped the run, and the checkpoint to continue from; there until the run continues."""
WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The adapter, as PEFT names it."""
BEST_ADAPTER, LAST_ADAPTER = "best", "final"
"""Folders: of the best validated adapter while a run trains (it ends at the top); of the last step's, where that is
another one."""
TRAINING_CONFIG = "training_config.json"
"""The file that tells a run folder from any other folder; written first."""
LOGGER_RUNS = "logs/loggers.json"
"""What wandb, mlflow or trackio call this run, for a resume to continue it there."""
LOG_FILES = {"cpu": "logs/training.log", "cuda": "logs/cuda_optimized_training.log"}
"""By accelerator; that on a GPU has the name that the guides look for. A run that has moved to another has both."""
NAMED_TEMPLATES = "additional_chat_templates"
"""The folder of chat templates that have a name, as transformers has it."""
LOCK = ".lock"
MODEL_CARD = "README.md"
"""The last file that a run writes."""

_WRITTEN = (
    re.escape(TRAINING_CONFIG), r"config\.yaml", r"scu_\w+\.jsonl?", re.escape(DOCUMENTS), re.escape(EVALUATION),
    re.escape(WEIGHTS), re.escape(ADAPTER_CONFIG), BEST_ADAPTER, LAST_ADAPTER, r"checkpoint-\d+", "logs",
    re.escape(LOCK), re.escape(MODEL_CARD), r"report\.html", re.escape(SAMPLES), re.escape(STOPPED),
    re.escape(ANSWERS), re.escape(ELSEWHERE), re.escape(GENERAL),
    r"(control|identification)\.(png|svg)", r"identification\.json", "excitation", "verification",
    # of tokenizers
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json", r"\w+\.model", r"(merges|vocab)\.txt",
    r"chat_template\.jinja", NAMED_TEMPLATES,
)  # fmt: skip
"""What a run writes at the top of its folder. Whatever else is there is the user's."""

_INSIDE = re.compile(
    r"adapter_model\.safetensors|adapter_config\.json|state\.ckpt|manifest\.json|validation\.json|best|README\.md"
    r"|csv|tensorboard|from-checkpoint-\d+|version_\d+|metrics\.csv|hparams\.yaml|events\.out\.tfevents\..*"
    r"|(cuda_optimized_)?training\.log|loggers\.json"
)
"""What a run writes into the folders of its own: adapters, checkpoints and logs."""


class RunFolder:
    """A folder that holds one run.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._lock = FileLock(self.path / LOCK)

    def check(self, overwrite: bool, resuming: bool) -> None:
        """Refuse a folder that cannot be written or holds something else. Makes and deletes nothing.

        Raises:
            UserError: not writable, not empty and neither ``overwrite`` nor ``resuming``, with a pipe in it or a link
                that leads out of it, to be replaced and holding what no run has written, or to be resumed and no run's.
        """
        require_writable("--output-dir", self.path, make=False)
        own, wandb = os.path.realpath(self.path), self.path / "logs" / "wandb"
        only_files(self.path, but=wandb)
        for entry in self.path.rglob("*"):
            if wandb in entry.parents:  # it has links to its cache, and a new folder a run
                continue
            if entry.is_symlink() and not Path(os.path.realpath(entry)).is_relative_to(own):
                raise UserError(
                    f"--output-dir {self.path}: {entry.relative_to(self.path)} is a link that leads out of the folder, "
                    "and a run would write there; put what it leads to in its place"
                )
        if not self.path.exists() or all(map(_is_trace, self.path.iterdir())):
            return
        is_run = (self.path / TRAINING_CONFIG).is_file()
        if resuming and not is_run:  # a checkpoint was copied there, and the rest is somebody's
            raise UserError(
                f"--output-dir {self.path}: holds a checkpoint but is no run folder (no {TRAINING_CONFIG}); name a new "
                "--output-dir"
            )
        if resuming:
            return
        if not overwrite:
            raise UserError(
                f"--output-dir {self.path}: is not empty; choose another folder, replace the run with --overwrite, "
                "or continue it with --resume-from-checkpoint last"
            )
        if not is_run:
            raise UserError(f"--overwrite: {self.path} is not empty and not a run folder, so it is not touched")
        others = [str(entry.relative_to(self.path)) for entry in _foreign(self.path)]
        if others:
            listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            raise UserError(f"--overwrite: {self.path} holds {listed}, which no run has written; move that elsewhere")

    def lock(self) -> None:
        """Keep every other run out of this folder until ``unlock``, or until this process ends, however it ends.

        Raises:
            UserError: another process holds it, or the file system has no locks.
        """
        file = self.path / LOCK
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"--output-dir {self.path}: another process{_holder(file)} is running in it; wait, choose another "
                f"folder, or remove {file} if that process is gone"
            ) from None
        except OSError as error:
            raise UserError(
                f"--output-dir {self.path}: cannot be locked against other runs ({error.strerror}); choose a folder on "
                "another file system"
            ) from error
        if not isinstance(self._lock, SoftFileLock):  # which it becomes where there are none, and names its process
            with suppress(PermissionError):  # on Windows what is locked cannot be written: the holder stays unnamed
                file.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")

    def unlock(self) -> None:
        """Let others in."""
        self._lock.release(force=True)

    def clear(self) -> None:
        """Empty a run folder that is to be replaced. What marks it as one goes last: it may be cut short by a kill.

        What no run has written stays, should it have come since ``check``.
        """
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == TRAINING_CONFIG):
            if entry.name != LOCK and _is_ours(entry):
                remove(entry)

    def sweep(self) -> None:
        """Put right what a run that was killed while it wrote has left half-written, as ``atomic.sweep``."""
        sweep(self.path.rglob(".*"))

    @property
    def trained(self) -> bool:
        """Whether a run has trained to its end here, and scored what came of it."""
        return (self.path / METRICS).is_file()

    @property
    def finished(self) -> bool:
        """Whether a run went to its end here and wrote everything."""
        return self.trained and (self.path / MODEL_CARD).is_file()

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file completely or not at all, as ``as_json``."""
        self.write_text(name, as_json(value))

    def write_text(self, name: str, text: str) -> None:
        """Write a text file completely or not at all."""
        self.write_lines(name, [text])

    def write_lines(self, name: str, lines: Iterable[str]) -> None:
        """As ``write_text``, of a text that need not fit into memory. What is no UTF-8 is written as its code."""
        with (
            replacing(self.path / name) as temporary,
            temporary.open("w", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.writelines(lines)

    def append_history(self, record: dict[str, Any]) -> None:
        """Add a tick's record as one line, so that a crash loses none of those before."""
        with (self.path / HISTORY_LINES).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def read_history(self) -> list[dict[str, Any]]:
        """The records so far; a last line that a crash tore is left out."""
        path = self.path / HISTORY_LINES
        if not path.is_file():
            finished = self.path / HISTORY
            return read_json(finished, kind=list) if finished.is_file() else []
        try:
            lines = read_file(path).decode(errors="replace").split("\n")
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        records = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                records.append(parse_json(line, parse_int=short_int))
            except ValueError as error:
                remedy = "take the line out to do without that tick"
                raise UserError(f"{path}: line {number} is damaged ({error}); {remedy}") from error
        return records

    def truncate_history(self, step: int) -> int:
        """Drop what was recorded after ``step``, and what says that the run ended: it does those steps again.

        Returns:
            How many records are left.
        """
        kept = [record for record in self.read_history() if record["step"] <= step]
        self.write_text(HISTORY_LINES, "".join(json.dumps(record) + "\n" for record in kept))
        for name in (HISTORY, METRICS, EVALUATION, SAMPLES, ANSWERS, ELSEWHERE, STOPPED, MODEL_CARD):
            (self.path / name).unlink(missing_ok=True)
        sync(self.path)
        return len(kept)

    def sync_history(self) -> None:
        """Have the records on the disk, and not only on the way there: a checkpoint is about to count on them."""
        if (self.path / HISTORY_LINES).is_file():
            sync(self.path / HISTORY_LINES)
            sync(self.path)

    def finish_history(self) -> list[dict[str, Any]]:
        """Turn the lines into one JSON list, and return it."""
        records = self.read_history()
        self.write_json(HISTORY, records)
        (self.path / HISTORY_LINES).unlink(missing_ok=True)
        return records

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first."""
        found = [path for path in self.path.glob("checkpoint-*") if re.fullmatch("checkpoint-[0-9]+", path.name)]
        return sorted(found, key=step_of)


def _holder(lock: Path) -> str:
    """Which process has written its name into a lock's file, and on which machine."""
    try:
        process, machine, *_ = read_file(lock).decode(errors="replace").split()
    except (OSError, ValueError):
        return ""
    return f" ({printable(process)} on {printable(machine)})"


def read_json(path: Path, content: bytes | None = None, kind: type = dict) -> Any:
    """The JSON object in a file.

    Args:
        path: the file.
        content: of the file, where it was read already.
        kind: ``list`` where the file holds a list.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        content = read_file(path) if content is None else content
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    try:
        value = parse_json(content, parse_int=short_int)
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path}: not JSON ({error}); the file is damaged") from error
    if not isinstance(value, kind):
        raise UserError(f"{path}: not a JSON {'list' if kind is list else 'object'}; the file is damaged")
    return value


def read_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where the file is missing. Raises UserError where it is damaged."""
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found


def unreadable(path: Path, error: OSError | ValueError) -> UserError:
    """What there is to say of a file that ``read_file`` cannot read."""
    return UserError(f"{path}: cannot be read ({error.strerror if isinstance(error, OSError) else error})")


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint is named after."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def csv_legs(folder: Path) -> list[tuple[int, Path]]:
    """The folders of a run's ``CSV_LOG``, with the steps after which they begin, in order: its own, and those of each
    time that it was continued."""
    top, begins = folder / "logs" / "csv", "from-checkpoint-"
    legs = [(step, path) for path in top.glob(f"{begins}*") if (step := path.name.removeprefix(begins)).isdigit()]
    return [(0, top), *sorted((int(step), path) for step, path in legs)]


def _is_trace(entry: Path) -> bool:
    """Whether it is all that a run leaves that was killed before its first file was whole: the lock, half a file."""
    return entry.name == LOCK or bool(UNFINISHED.fullmatch(entry.name))


def _foreign(folder: Path) -> Iterator[Path]:
    """What no run has written in a run folder, or in a folder of one."""
    for entry in sorted(folder.iterdir()):
        if not _is_ours(entry):
            yield entry
        elif entry.is_dir() and not entry.is_symlink() and not UNFINISHED.fullmatch(entry.name):
            of_a_run = entry.name in ("excitation", "verification")
            yield from _foreign(entry) if of_a_run else _foreign_inside(entry)


def _foreign_inside(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.rglob("*")):
        if folder.name == "logs" and entry.relative_to(folder).parts[0] in LOGGERS:
            continue  # files of a library, which names them as it likes
        unfinished = any(UNFINISHED.fullmatch(part) for part in entry.relative_to(folder).parts)
        if not (unfinished or _INSIDE.fullmatch(entry.name)):
            yield entry


def is_general_text(path: str) -> bool:
    """Whether a file is general text that a run, or ``data inspect --general``, has written."""
    try:
        with Path(path).expanduser().open("rb") as file:
            return GENERAL_SCHEMA.encode() in file.read(len(GENERAL_SCHEMA) + 20)
    except OSError:
        return False


def _is_ours(entry: Path) -> bool:
    return _is_trace(entry) or any(re.fullmatch(pattern, entry.name) for pattern in _WRITTEN)


def require_writable(flag: str, folder: Path, make: bool = True) -> None:
    """Make the folder that a flag names, and for a moment a file in it: now, and not after hours of runs.

    Args:
        flag: for the message.
        folder: that is to be written to.
        make: False leaves it unmade, and tries the nearest folder above it that is there.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        folder.exists()  # says so where the name is too long
        if (there := nearest(folder)).is_file():
            raise UserError(f"{flag} {folder}: {there} is a file, and not a folder; choose another, or move that away")
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=nearest(folder)):
            pass
    except OSError as error:
        raise UserError(f"{flag} {folder}: cannot be written to ({error.strerror}); choose another folder") from error


def require_writable_file(flag: str, file: Path) -> Path:
    """As ``require_writable``, of the folder of a file that a flag names, and that is or may become a regular one.

    Returns:
        The file that links lead to: what is written takes the place of that, and not of the link.
    """
    if file.is_dir():
        raise UserError(f"{flag} {file}: is a folder; name a file")
    place = Path(os.path.realpath(file))
    printed = [os.path.realpath(f"/dev/fd/{number}") for number in (1, 2)]
    is_there = file.exists() or os.path.lexists(place)  # only the first sees a pipe, only the second a link in a circle
    if (is_there and not file.is_file()) or str(place) in printed:
        raise UserError(f"{flag} {file}: is no regular file, or what this command prints to; name a file of its own")
    require_writable(flag, place.parent)
    return place


def nearest(folder: Path) -> Path:
    """The folder itself or, where it is missing, the nearest above it that is there."""
    path = folder.absolute()
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def as_json(value: object) -> str:
    """A value as a JSON file has it; NaN and infinities become null."""
    return json.dumps(finite(value), indent=2, allow_nan=False) + "\n"


def finite(value: object) -> object:
    """The same JSON value with null for every number that JSON cannot say."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
