"""Tokens on disk: written once for a text, a tokenizer and the settings that matter, and read from there after.

A folder of plain arrays, and ``meta.json`` that says how far they go, with a checksum of each. It is moved into place
as a whole, under a lock: of two runs that prepare the same text one waits for the other. What an interrupted
preparation has written is taken up again.
"""

import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import parse_json
from granite_scu.data.tokens.stream import ARRAYS, OF_DOCUMENTS, Corpus, StoredArray, in_pieces
from granite_scu.storage.atomic import ensure_folder, replacing, take_place
from granite_scu.storage.kept import digest_of

_log = logging.getLogger(__name__)

VERSION = 19
"""Of the layout, of what is made of a text, and of where long ones are cut (an interrupted preparation counts the
pieces): part of the key."""

NOTES = {"sizes": dict, "checksums": dict, "counts": dict, "firsts": dict, "formats": list}
"""What is noted of a preparation, and by which kind of value: how far its files go, with a checksum of each, and as of
``Corpus``."""

NAMES, META = "names", "meta.json"
FILES = (*ARRAYS, NAMES)
SAVED_EVERY = 32
"""Parts of half a megabyte of text between two notes of how far a preparation has come."""


def prepared(folder: Path, facts: dict[str, Any], make: Callable[[int], Iterator[Corpus]], n_vocabulary: int) -> Corpus:
    """The tokens that these facts determine, in this version of the layout: found, or made and kept.

    Args:
        folder: of all prepared texts.
        facts: of the text, its tokenizer and the settings; their digest is its name.
        make: given the pieces that were tokenised before an interruption, yields the parts that are left.
        n_vocabulary: token ids that there are; what is kept with others is made again.

    Raises:
        UserError: the folder cannot be written, or what ``make`` raises.
    """
    found = folder / (key := digest_of([VERSION, facts]))
    with _naming(folder, "what is kept there cannot be read", "have its permissions changed"):
        # Moved there as a whole, perhaps by someone else: it may be that we can only read.
        if _is_sound(found, n_vocabulary):
            return _open(found)
    with _naming(folder, "cannot be written", "make room"):
        ensure_folder(folder)
        with _turn(folder / f"{key}.lock"):
            if not _is_sound(found, n_vocabulary):
                if found.exists():
                    _log.warning("the kept tokens in %s are damaged, and are made again", found)
                _write(folder / f"{key}.partial", make)
                take_place(folder / f"{key}.partial", found)
            return _open(found)


def _turn(path: Path) -> AbstractContextManager:
    """The lock, once no other run has it, to be released at the end of the context."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _log.info("waiting for another process, which is tokenising the same text; if there is none, remove %s", path)
        return lock.acquire()


@contextmanager
def _naming(folder: Path, problem: str, remedy: str) -> Iterator[None]:
    """Say of an error of the system that it is the folder's; an error about no file in it is raised unchanged."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and folder not in (Path(error.filename), *Path(error.filename).parents):
            raise
        raise UserError(f"--cache-dir {folder}: {problem} ({error}); {remedy} or name another folder") from error


def _write(partial: Path, make: Callable[[int], Iterator[Corpus]]) -> None:
    partial.mkdir(exist_ok=True)
    noted = _noted(partial)
    if noted is None and (partial / META).exists():
        _log.warning("what an interrupted preparation left in %s is damaged; it starts again", partial)
    noted = noted or {name: kind() for name, kind in NOTES.items()}
    counts, firsts, formats = _counts(noted)
    with ExitStack() as opened:
        files: dict[str, BinaryIO] = {name: opened.enter_context((partial / name).open("ab")) for name in FILES}
        for name, file in files.items():
            file.truncate(noted["sizes"].get(name, 0))
            file.seek(0, os.SEEK_END)

        def save() -> None:
            told = {"counts": counts, "firsts": firsts, "formats": [[*key, n] for key, n in formats.items()]}
            _save(partial / META, files, {"checksums": noted["checksums"], **told})

        for number, part in enumerate(make(counts["pieces"]), start=1):
            _append(files, noted["checksums"], part)
            counts, firsts, formats = counts + part.counts, part.firsts | firsts, formats + part.formats
            if number % SAVED_EVERY == 0:
                save()
        save()


def _counts(noted: dict[str, Any]) -> tuple[Counter[str], dict[str, str], Counter[tuple[int, str]]]:
    """What is noted of the text, as of ``Corpus``."""
    formats = Counter({(source, name): n for source, name, n in noted["formats"]})
    return Counter(noted["counts"]), noted["firsts"], formats


def _noted(folder: Path) -> dict[str, Any] | None:
    """What ``_save`` wrote there; None where there is nothing, something else, or less than it says in a file."""
    try:
        noted = parse_json((folder / META).read_bytes())
        found = {name: (folder / name).stat().st_size for name in FILES}
        same = {name: type(value) for name, value in noted.items()} == NOTES
        counts, _, _ = _counts(noted)
        known = same and min(counts.values(), default=0) >= 0
        return noted if known and all(0 <= noted["sizes"][name] <= found[name] for name in FILES) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, KeyError, TypeError):
        return None


def _save(path: Path, files: dict[str, BinaryIO], told: dict[str, Any]) -> None:
    """Note what is told, and how far the files go; only once their contents are on the disk."""
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    sizes = {name: file.tell() for name, file in files.items()}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"sizes": sizes, **told}), encoding="utf-8")


def _append(files: dict[str, BinaryIO], checksums: dict[str, int], part: Corpus) -> None:
    begin = files["tokens"].tell() // np.dtype(ARRAYS["tokens"]).itemsize
    arrays = {name: getattr(part, name) for name in ARRAYS} | {"ends": part.ends + begin}
    names = "".join(" ".join(name.splitlines()) + "\n" for name in part.names)
    written = {name: np.ascontiguousarray(array, ARRAYS[name]).data for name, array in arrays.items()}
    written[NAMES] = memoryview(names.encode(errors="backslashreplace"))  # a file's may be of any bytes
    for name, data in written.items():
        files[name].write(data)
        checksums[name] = zlib.crc32(data, checksums.get(name, 0))


def _is_sound(folder: Path, n_vocabulary: int) -> bool:
    """Whether a text is kept there, to the last byte and unchanged, and of tokens that there are.

    Reads all of it, which takes a second or two for a gigabyte of text.
    """
    noted = _noted(folder)
    return (
        noted is not None
        and all(_checksum(folder / name, noted["sizes"][name]) == noted["checksums"].get(name, 0) for name in FILES)
        and all(ids.max() < n_vocabulary and ids.min() >= 0 for ids in in_pieces(_stored(folder, noted, "tokens")))
    )


def _checksum(path: Path, size: int) -> int:
    """CRC-32 of the first ``size`` bytes, against disks that err; who may write there can set it as well."""
    return reduce(lambda sum, piece: zlib.crc32(piece, sum), in_pieces(StoredArray(path, np.uint8, size)), 0)


def _stored(folder: Path, noted: dict[str, Any], name: str) -> StoredArray:
    return StoredArray(folder / name, ARRAYS[name], noted["sizes"][name] // np.dtype(ARRAYS[name]).itemsize)


def _open(folder: Path) -> Corpus:
    noted = parse_json((folder / META).read_bytes())
    arrays: dict[str, Any] = {name: _stored(folder, noted, name) for name in ARRAYS}
    arrays |= {name: arrays[name][:] for name in OF_DOCUMENTS}
    counts, firsts, formats = _counts(noted)
    return Corpus(**arrays, names=_Lines(folder / NAMES), counts=counts, firsts=firsts, formats=formats)


class _Lines(Sequence[str]):
    """The lines of a file, of which few are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        with self.path.open(encoding="utf-8") as lines:
            return sum(1 for _ in lines)

    def __getitem__(self, wanted: Any) -> Any:
        with self.path.open(encoding="utf-8") as lines:
            return next(islice(lines, wanted, None)).rstrip("\n")
