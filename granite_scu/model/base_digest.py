"""Which weights a base model has, by the SHA-256 of its files: a folder, or a hub's name, may hold others later."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from granite_scu.config.errors import UserError
from granite_scu.model.base_files import weight_files
from granite_scu.model.finding import gguf_of, resolve
from granite_scu.storage import manifest
from granite_scu.storage.kept import kept
from granite_scu.storage.run_folder import TRAINING_CONFIG

log = logging.getLogger(__name__)

RECORDED = "base_files"
"""The field of ``training_config.json``."""

LARGE = 100 * 2**20
"""Bytes from which a digest is kept beside the tokens: to read these takes longer than to look it up."""


def record(name: str) -> dict[str, Any] | None:
    """What a base model's weights are: ``files``, each with ``bytes`` and ``sha256``, and of the hub's the ``commit``.

    Args:
        name: as ``--model`` has it.

    Returns:
        None where the weights are not on this machine, or not all of them: what is wrong, says whoever loads them.
    """
    path, commit = Path(name).expanduser(), {}
    try:
        if path.exists() and (gguf := gguf_of(path, name)):
            return {"files": {gguf.name: _facts(gguf)}}
        folder = Path(resolve(name))
        if not folder.is_dir():
            cached = try_to_load_from_cache(name, "config.json")
            if not isinstance(cached, str):
                return None
            folder = Path(cached).parent
            commit = {"commit": folder.name}
        return {**commit, "files": {file.name: _facts(file) for file in weight_files(folder, name)}}
    except UserError:
        return None


def check(training: Mapping[str, Any], label: str, name: str, refuse: bool) -> None:
    """Compare a base with the one that a run was trained on.

    Args:
        training: the run's ``training_config.json``; empty for an adapter from elsewhere.
        label: what messages name the run by.
        name: of the base, as ``--model`` has it.
        refuse: whether another base is refused, and not only warned of.

    Raises:
        UserError: it is another one, and ``refuse``; or the run's record is damaged.
    """
    then = training.get(RECORDED)
    if then is None:
        if training:
            log.info("%s: its base's weights were not recorded; nobody knows whether %s has the same", label, name)
        return
    before, now = _digests(then, label), record(name)
    if now is None or (wrong := _difference(before, _digests(now, label))) is None:
        return
    words = f"--model {name}: its weights are not those that {label} was trained on ({wrong})"
    if refuse:
        raise UserError(f"{words}; put the former files there, or name a folder that has them by --model")
    log.warning("%s; what the adapter does on them says nothing of its training", words)


def _digests(recorded: Any, label: str) -> dict[str, str]:
    try:
        return {str(name): str(facts["sha256"]) for name, facts in recorded["files"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{label}: {TRAINING_CONFIG} has a damaged {RECORDED}; copy the folder again") from error


def _difference(before: dict[str, str], now: dict[str, str]) -> str | None:
    if sorted(before.values()) == sorted(now.values()):  # whatever the files are called
        return None
    for name, digest in before.items():
        if name not in now:
            return f"{name} is not among them"
        if now[name] != digest:
            return f"{name} has the SHA-256 {now[name][:12]}..., and had {digest[:12]}..."
    return f"{next(iter(now.keys() - before.keys()))} is new"


def _facts(file: Path) -> dict[str, Any]:
    found = file.resolve()
    stat = found.stat()
    changed = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    return {"bytes": stat.st_size, "sha256": _sha256(found, stat.st_size, *changed)}


def _sha256(file: Path, size: int, *changed: int) -> str:
    """The digest of a file, read once while nothing of the file changes."""
    if size < LARGE:
        return manifest.sha256(file)

    def read() -> str:
        log.info("reading %.1f GB of %s for its SHA-256", size / 1e9, file.name)
        return manifest.sha256(file)

    return kept("digests.json", [str(file), size, *changed], read, str)
