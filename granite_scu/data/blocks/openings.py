"""How some documents of a split begin: what a model may be asked to continue."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from granite_scu.data.blocks.packing import Blocks

_LENGTH, _MAX_LENGTH, _MIN_REST = 32, 256, 8
"""Tokens: of a text's opening; of the longest that is taken of a chat; and what has to follow it."""
_LOOKED_AT = 200
"""Blocks that are searched."""


@dataclass(frozen=True, eq=False)
class Opening:
    """The beginning of a document.

    Attributes:
        tokens: (time,) int32: of a text its first ones, of a conversation all before the first that is learned.
        rest: (time,) int32, how the document continues.
    """

    tokens: NDArray[np.int32]
    rest: NDArray[np.int32]


def openings(blocks: Blocks, count: int) -> list[Opening]:
    """The first ones among the blocks, ``count`` or as many as there are.

    Where no document begins in the blocks, as in the tail of one long book, stretches of it stand for documents.
    """
    if not len(blocks):
        return []
    spans = np.concatenate([blocks.spans_of(index) for index in range(min(len(blocks), _LOOKED_AT))])
    ends = blocks.stream.ends
    owners = np.searchsorted(ends, spans[:, 0])
    begins = np.where(owners > 0, ends[owners - 1] + 1, 0) == spans[:, 0]
    starts = spans[begins, 0] if begins.any() else spans[:, 0]
    found = _openings(blocks, starts.tolist())
    return [opening for opening, _ in zip(found, range(count), strict=False)]


def _openings(blocks: Blocks, starts: list[int]) -> Iterator[Opening]:
    stream = blocks.stream
    for start in starts:
        stop = int(stream.ends[np.searchsorted(stream.ends, start)])
        learned = int(np.argmax(stream.targets[start:stop]))
        length = learned if learned > 1 else _LENGTH  # of a text all is learned but the first
        if length <= _MAX_LENGTH and start + length + _MIN_REST <= stop:
            yield Opening(stream.tokens[start : start + length], stream.tokens[start + length : stop])
