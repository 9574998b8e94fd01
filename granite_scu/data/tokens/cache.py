"""Tokens on disk: written once for a text, a tokenizer and the settings that matter, and read from there after.

A folder of plain arrays, and ``meta.json`` that says how far they go, with a checksum of each. It is moved into place
as a whole, under a lock: of two runs that prepare the same text one waits for the other. What an interrupted
preparation has written is taken up again.
"""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from granite_scu.config.errors import UserError
from granite_scu.config.outside import parse_json
from granite_scu.data.tokens.encoding import Part, Piece, Stream, joined
from granite_scu.data.tokens.stored import StoredArray, in_pieces
from granite_scu.storage.atomic import ensure_folder, replacing, take_place

_log = logging.getLogger(__name__)

VERSION = 11
"""Of the layout, of what is made of a text, and of where long ones are cut (an interrupted preparation counts the
pieces): part of the key."""

OF_TOKENS: dict[str, Any] = {"tokens": np.int32, "widths": np.uint16, "targets": np.bool_}
OF_DOCUMENTS: dict[str, Any] = {
    "ends": np.int64,
    "digests": np.uint64,
    "bare": np.uint64,
    "places": np.uint64,
    "characters": np.uint64,
    "sources": np.uint16,
    "is_chat": np.bool_,
}
ARRAYS = OF_TOKENS | OF_DOCUMENTS
"""The files of a prepared text, with an entry for each token or for each document."""

NOTHING: dict[str, Any] = {
    "pieces": 0, "sizes": {}, "checksums": {}, "n_empty": 0, "first_empty": "",
    "n_control": 0, "first_control": "", "n_thoughts": 0, "n_system": 0,
}  # fmt: skip
"""What is noted of a preparation, before it has begun."""
KINDS = {name: type(value) for name, value in NOTHING.items()}

NAMES, META = "names", "meta.json"
FILES = (*ARRAYS, NAMES)
SAVED_EVERY = 32
"""Parts of half a megabyte of text between two notes of how far a preparation has come."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A tokenised text.

    Attributes:
        stream: the tokens, read where they are asked for.
        digests: (documents,) by which their texts are known again.
        bare: (documents,) as ``digests``, of the texts without white space at their ends.
        places: (documents,) of the texts in the seeded order of splits.
        characters: (documents,) of their texts.
        sources: (documents,) number of what each came from.
        is_chat: (documents,) whether they came as messages.
        name: where a document came from, by its number.
        n_empty: documents left out because nothing stands in them.
        first_empty: name of the first of them.
        n_control: control tokens that somebody wrote.
        first_control: the first of them and where it stands.
        n_thoughts: answers of which the chat template leaves out what was thought.
        n_system: conversations with a system turn of their own.
        record_formats: documents that are not empty by the format of the records they were; not kept with the tokens.
    """

    stream: Stream
    digests: NDArray[np.uint64]
    bare: NDArray[np.uint64]
    places: NDArray[np.uint64]
    characters: NDArray[np.uint64]
    sources: NDArray[np.uint16]
    is_chat: NDArray[np.bool_]
    name: Callable[[int], str]
    n_empty: int
    first_empty: str
    n_control: int = 0
    first_control: str = ""
    n_thoughts: int = 0
    n_system: int = 0
    record_formats: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_documents(self) -> int:
        return len(self.digests)

    @property
    def n_conversations(self) -> int:
        """Documents that came as messages."""
        return int(np.count_nonzero(self.is_chat))


def in_memory(parts: Iterable[Part]) -> Prepared:
    """A text of which nothing is kept."""
    parts = list(parts)
    documents = [piece for part in parts for piece in part.documents]
    return Prepared(
        joined(parts),
        **{name: np.array(facts, ARRAYS[name]) for name, facts in _facts(documents).items()},
        name=[piece.name for piece in documents].__getitem__,
        n_empty=sum(len(part.empty) for part in parts),
        first_empty=next((name for part in parts for name in part.empty), ""),
        n_control=sum(part.n_control for part in parts),
        first_control=next((part.first_control for part in parts if part.n_control), ""),
        n_thoughts=sum(part.n_thoughts for part in parts),
        n_system=sum(part.n_system for part in parts),
    )


def _facts(documents: list[Piece]) -> dict[str, list[int]]:
    """What is kept of each document, of which these are the last pieces."""
    prints = [piece.fingerprint for piece in documents]
    return {
        "digests": [fingerprint.digest for fingerprint in prints],
        "bare": [fingerprint.bare for fingerprint in prints],
        "places": [fingerprint.place for fingerprint in prints],
        "characters": [fingerprint.characters for fingerprint in prints],
        "sources": [piece.source for piece in documents],
        "is_chat": [piece.is_conversation for piece in documents],
    }


def key_of(facts: dict[str, Any]) -> str:
    """The name of what these facts determine."""
    return hashlib.sha256(json.dumps([VERSION, facts], sort_keys=True).encode()).hexdigest()[:32]


def prepared(folder: Path, key: str, make: Callable[[int], Iterator[Part]], n_vocabulary: int) -> Prepared:
    """The tokens of this name: found, or made and kept.

    Args:
        folder: of all prepared texts.
        key: the text's name.
        make: given the pieces that were tokenised before an interruption, yields the parts that are left.
        n_vocabulary: token ids that there are; what is kept with others is made again.

    Raises:
        UserError: the folder cannot be written, or what ``make`` raises.
    """
    found = folder / key
    with _naming(folder, "what is kept there cannot be read", "have its permissions changed"):
        if _is_sound(
            found, n_vocabulary
        ):  # moved there as a whole, perhaps by someone else: it may be that we can only read
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


def _write(partial: Path, make: Callable[[int], Iterator[Part]]) -> None:
    partial.mkdir(exist_ok=True)
    progress = _noted(partial)
    if progress is None:
        if (partial / META).exists():
            _log.warning("what an interrupted preparation left in %s is damaged; it starts again", partial)
        progress = {**NOTHING, "sizes": {}, "checksums": {}}
    with ExitStack() as opened:
        files: dict[str, BinaryIO] = {name: opened.enter_context((partial / name).open("ab")) for name in FILES}
        for name, file in files.items():
            file.truncate(progress["sizes"].get(name, 0))
            file.seek(0, os.SEEK_END)
        length = progress["sizes"].get("tokens", 0) // np.dtype(ARRAYS["tokens"]).itemsize
        for number, part in enumerate(make(progress["pieces"]), start=1):
            _append(files, progress["checksums"], part, length)
            length += len(part.tokens)
            progress["pieces"] += part.n_pieces
            progress["n_empty"] += len(part.empty)
            progress["first_empty"] = progress["first_empty"] or next(iter(part.empty), "")
            progress["n_control"] += part.n_control
            progress["first_control"] = progress["first_control"] or part.first_control
            progress["n_thoughts"] += part.n_thoughts
            progress["n_system"] += part.n_system
            if number % SAVED_EVERY == 0:
                _save(partial / META, files, progress)
        for file in files.values():
            file.flush()
        _save(partial / META, files, progress)


def _noted(folder: Path) -> dict[str, Any] | None:
    """What ``_save`` wrote there; None where there is nothing, something else, or less than it says in a file."""
    try:
        noted = parse_json((folder / META).read_bytes())
        found = {name: (folder / name).stat().st_size for name in FILES}
        same = {name: type(value) for name, value in noted.items()} == KINDS and noted["pieces"] >= 0
        return noted if same and all(0 <= noted["sizes"][name] <= found[name] for name in FILES) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, KeyError, TypeError):
        return None


def _save(path: Path, files: dict[str, BinaryIO], progress: dict[str, Any]) -> None:
    """Note how far the files go; only once their contents are on the disk."""
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    progress["sizes"] = {name: file.tell() for name, file in files.items()}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(progress), encoding="utf-8")


def _append(files: dict[str, BinaryIO], checksums: dict[str, int], part: Part, begin: int) -> None:
    arrays = {name: getattr(part, name) for name in OF_TOKENS}
    arrays |= {"ends": part.ends + begin, **_facts(part.documents)}
    names = "".join(" ".join(piece.name.splitlines()) + "\n" for piece in part.documents)
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


def _open(folder: Path) -> Prepared:
    meta = parse_json((folder / META).read_bytes())
    arrays = {name: _stored(folder, meta, name) for name in ARRAYS}
    of_documents = {name: arrays[name][:] for name in OF_DOCUMENTS}
    stream = Stream(ends=of_documents.pop("ends"), **{name: arrays[name] for name in OF_TOKENS})
    names = ("n_empty", "first_empty", "n_control", "first_control", "n_thoughts", "n_system")
    counts = {name: meta[name] for name in names}
    return Prepared(stream, **of_documents, name=partial(_line, folder / NAMES), **counts)


def _line(path: Path, wanted: int) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(line.rstrip("\n") for number, line in enumerate(lines) if number == wanted)
