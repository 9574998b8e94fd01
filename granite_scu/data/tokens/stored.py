"""An array in a file, of which only what is asked for is read.

Not mapped into memory: the system ends a process that reads a mapped file behind its end (SIGBUS), and no handler of
Python's can say a word before that. Here a file that was cut is one line.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from granite_scu.config.errors import UserError

PIECE = 1 << 22
"""Entries that are read at a time where all are wanted."""


class StoredArray:
    """A row of numbers in a file that nobody changes any more.

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
            # By place, since processes that were forked share the position. A signal or 2 GiB may end it early.
            n_read = os.preadv(self._file.fileno(), [view], offset)
            if not n_read:
                raise UserError(
                    f"--cache-dir {self.path.parent.parent}: {self.path} was cut while the run read it; "
                    "start the run again, which makes it again"
                )
            view, offset = view[n_read:], offset + n_read
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredArray, (self.path, self.dtype, self._length)


def in_pieces(array: StoredArray | NDArray[Any]) -> Iterator[NDArray[Any]]:
    """All entries, some megabytes at a time."""
    return (array[start : start + PIECE] for start in range(0, len(array), PIECE))
