"""A tokenised text: the tokens of all documents, each ended by the end-of-text token, as one row, in a file or in
memory."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from granite_scu.config.errors import UserError

PIECE = 1 << 22
"""Entries that are read at a time where all are wanted."""


class StoredArray:
    """A row of numbers in a file that nobody changes any more, of which only what is asked for is read.

    Not mapped into memory: the system ends a process that reads a mapped file behind its end (SIGBUS), and no handler
    of Python's can say a word before that. Here a file that was cut is one line.

    Args:
        path: of the file. It stays open, so that what is deleted can be read to the end.
        dtype: of an entry.
        length: entries.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: Any, length: int) -> None:
        self.path, self.dtype, self._length = path, np.dtype(dtype), length
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Consecutive entries, in memory. Raises UserError where the file has become shorter."""
        start, stop, step = part.indices(self._length)
        assert step == 1
        found = np.empty(max(0, stop - start), self.dtype)
        view, offset = memoryview(found).cast("B") if len(found) else memoryview(b""), start * self.dtype.itemsize
        while view:
            n_read = self._read(view, offset)  # a signal or 2 GiB may end it early
            if not n_read:
                raise UserError(
                    f"--cache-dir {self.path.parent.parent}: {self.path} was cut while the run read it; "
                    "start the run again, which makes it again"
                )
            view, offset = view[n_read:], offset + n_read
        return found

    def _read(self, view: memoryview, offset: int) -> int:
        """Bytes that were read from a place on, where it can be by that place: forked processes share the position.
        Windows cannot, and forks none."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], offset)
        self._file.seek(offset)
        return self._file.readinto(view)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredArray, (self.path, self.dtype, self._length)


def in_pieces(array: StoredArray | NDArray[Any]) -> Iterator[NDArray[Any]]:
    """All entries, some megabytes at a time."""
    return (array[start : start + PIECE] for start in range(0, len(array), PIECE))


OF_TOKENS: dict[str, Any] = {"tokens": np.int32, "widths": np.uint16, "targets": np.bool_}
OF_DOCUMENTS: dict[str, Any] = {
    "ends": np.int64,
    "digests": np.uint64,
    "bare": np.uint64,
    "question": np.uint64,
    "places": np.uint64,
    "characters": np.uint64,
    "sources": np.uint16,
    "is_chat": np.bool_,
}
ARRAYS = OF_TOKENS | OF_DOCUMENTS
"""The arrays of a ``Corpus``, with an entry for each token or for each document."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents as one row of T tokens.

    Attributes:
        tokens: (T,) int32 token ids; the last one ends a document. In a file or in memory, as the next two but one.
        ends: (documents,) int64 positions of the tokens that end a document, rising; in memory.
        widths: (T,) uint16 UTF-8 bytes of the text that each token stands for.
        targets: (T,) bool, whether a token is supervised; a document's first never is, for nothing predicts it.
    """

    tokens: NDArray[np.int32] | StoredArray
    ends: NDArray[np.int64]
    widths: NDArray[np.uint16] | StoredArray
    targets: NDArray[np.bool_] | StoredArray

    @property
    def bounds(self) -> NDArray[np.int64]:
        """(documents, 2) where each begins, and the position after its end of text."""
        return self.bounds_of(np.arange(len(self.ends)))

    def bounds_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """As ``bounds``, of some documents by number."""
        begins = np.where(documents > 0, self.ends[documents - 1] + 1, 0)
        return np.stack([begins, self.ends[documents] + 1], 1)


@dataclass(frozen=True, eq=False)
class Corpus(Stream):
    """A stream, and what is known of its documents and of the text that it was made of.

    Attributes:
        digests: (documents,) by which their texts are known again.
        bare: (documents,) as ``digests``, of the texts without white space at their ends.
        question: (documents,) as ``bare``, of what chats ask first, which those with other answers have in common.
        places: (documents,) of the texts in the seeded order of splits.
        characters: (documents,) of their texts.
        sources: (documents,) number of what each came from.
        is_chat: (documents,) whether they came as messages.
        names: (documents,) where they came from.
        counts: ``pieces`` that were tokenised; ``empty`` documents, which are left out; ``control`` tokens that
            somebody wrote; answers without the ``reasoning`` before them, or begun ``within`` a token; conversations
            with a ``system`` turn.
        firsts: of the empty documents and of the control tokens, the first and where it stands.
        formats: documents by the number of their source and the format that they were read by.
    """

    digests: NDArray[np.uint64]
    bare: NDArray[np.uint64]
    question: NDArray[np.uint64]
    places: NDArray[np.uint64]
    characters: NDArray[np.uint64]
    sources: NDArray[np.uint16]
    is_chat: NDArray[np.bool_]
    names: Sequence[str]
    counts: Counter[str] = field(default_factory=Counter)
    firsts: Mapping[str, str] = field(default_factory=dict)
    formats: Counter[tuple[int, str]] = field(default_factory=Counter)

    @property
    def n_documents(self) -> int:
        return len(self.digests)

    @property
    def n_conversations(self) -> int:
        """Documents that came as messages."""
        return int(np.count_nonzero(self.is_chat))

    def select(self, documents: NDArray[np.int64]) -> "Corpus":
        """Some documents, by number, as a corpus of their own in memory, with the counts of this one."""
        bounds = self.bounds_of(documents)
        arrays = {name: getattr(self, name)[documents] for name in OF_DOCUMENTS}
        arrays["ends"] = (bounds[:, 1] - bounds[:, 0]).cumsum() - 1
        for name in OF_TOKENS:
            array = getattr(self, name)
            arrays[name] = np.concatenate([array[:0], *(array[start:stop] for start, stop in bounds.tolist())])
        return replace(self, **arrays, names=[self.names[number] for number in documents.tolist()])

    def record_formats(self, source: int | None = None) -> Counter[str]:
        """Documents by the format that they were read by, of all sources or of one by its number."""
        found: Counter[str] = Counter()
        for (number, name), count in self.formats.items():
            found[name] += count if source in (None, number) else 0
        return +found


def joined(parts: Sequence[Corpus]) -> Corpus:
    """The corpus that consecutive parts make, in memory; the last of them ends with a document."""
    begins = np.cumsum([0, *(len(part.tokens) for part in parts)])
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    arrays["ends"] += np.repeat(begins[:-1], [len(part.ends) for part in parts])
    return Corpus(
        **arrays,
        names=[name for part in parts for name in part.names],
        counts=sum((part.counts for part in parts), Counter()),
        firsts={name: first for part in reversed(parts) for name, first in part.firsts.items()},
        formats=sum((part.formats for part in parts), Counter()),
    )
