"""How files and folders get their names: completely or not at all, and on the disk before anything counts on them."""

import errno
import filecmp
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = re.compile(r"\.(?P<name>.+)\.\d+\.(?P<kind>tmp|old)")
"""Names of what is not whole yet, and of what steps aside; of both, ``name`` is whose place it is for, or was."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; on success it takes the place of ``path``, file or folder.

    It is on the disk before it gets its name, so that neither a crash nor a power cut leaves half of it there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _located(temporary, path):
            yield temporary
            take_place(temporary, path)
    finally:
        remove(temporary)


@contextmanager
def adding_to(folder: Path) -> Iterator[Path]:
    """Give a temporary folder inside ``folder``, which is made if missing; on success its files move up to ``folder``.

    For libraries that write several files, and truncate those that are there. One that is there already, and the same,
    is left as it is.
    """
    beside = folder / f".new.{os.getpid()}.tmp"
    try:
        with _located(beside, folder), errors_of_rust(folder):
            ensure_folder(folder)
            remove(beside)  # of a process that was killed and had this one's number, as in a container
            beside.mkdir()
            yield beside
            sync_tree(beside)
            places = {file: folder / file.relative_to(beside) for file in beside.rglob("*") if file.is_file()}
            changed = {
                file: place
                for file, place in places.items()
                if not (place.is_file() and filecmp.cmp(file, place, shallow=False))
            }
            for file, place in changed.items():
                ensure_folder(place.parent)
                file.replace(place)
            for parent in {place.parent for place in changed.values()}:
                sync(parent)
    finally:
        remove(beside)


def take_place(new: Path, path: Path) -> None:
    """Rename a file or folder to ``path`` once it is on the disk; what is there makes way."""
    sync_tree(new)
    if not path.is_dir():
        new.replace(path)
        sync(path.parent)
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.old")  # a folder cannot be renamed over a full one
    path.rename(aside)
    new.rename(path)
    sync(path.parent)  # before the old one goes
    remove(aside)


def ensure_folder(path: Path) -> None:
    """Make a folder and those above it where they are missing, and have their names on the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync_tree(path: Path) -> None:
    """``sync`` a file, or a folder and everything in it.

    In a folder each file gets the mode that the umask has given the folder: some libraries write through temporary
    files that nobody else may read.
    """
    inside = list(path.rglob("*"))
    mode = path.stat().st_mode & 0o666
    for entry in inside:
        if entry.is_file() and entry.stat().st_mode & 0o666 != mode:
            entry.chmod(mode)
    for entry in (*inside, path):
        sync(entry)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, where the file system knows what that means."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove(entry: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; nothing where there is nothing."""
    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)


def sweep(entries: Iterable[Path]) -> None:
    """Remove those of some files and folders that a process which was killed has left half-written.

    What had stepped aside for something that did not get to its place goes back there, before anything is removed.
    """
    left = [(entry, found) for entry in entries if (found := UNFINISHED.fullmatch(entry.name))]
    for entry, found in left:
        place = entry.with_name(found["name"])
        if found["kind"] == "old" and not place.exists():
            entry.rename(place)
    for entry, _ in left:
        remove(entry)


@contextmanager
def errors_of_rust(path: Path) -> Iterator[None]:
    """Errors of the system from safetensors and tokenizers, which have them as words, as the ``OSError`` that they are.

    Args:
        path: what is written there.
    """
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if not number:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


@contextmanager
def _located(temporary: Path, path: Path) -> Iterator[None]:
    """Errors of the system with the file that they are about, by the name that it was to have."""
    try:
        yield
    except shutil.Error as error:  # of a copied tree: a list of (source, target, why) in place of an error's number
        _, target, why = error.args[0][0]
        found = re.search(r"\[Errno (\d+)\]", str(why))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(target).replace(str(temporary), str(path))) from error
    except OSError as error:  # of a write that failed, the system does not say where
        error.filename = str(error.filename or path).replace(str(temporary), str(path))
        raise
