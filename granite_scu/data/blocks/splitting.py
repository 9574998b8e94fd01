"""Training, validation and test: by whole documents, or by blocks where documents are too few.

The division does not depend on the run's seed, so that runs with different seeds are compared on the
same held-out text.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from granite_scu.data.sources.documents import Document

SPLIT_SEED = 0
MIN_DOCUMENTS = 10
"""Different texts below which a corpus is not divided by document."""
MIN_BLOCKS = 12
"""Blocks below which ``by_block`` has nothing to hold out: a tenth of the rest is less than one."""

AT_A_TIME = 1 << 14
"""Documents whose facts are Python objects at a time, of some hundred bytes each."""

T = TypeVar("T")
U = TypeVar("U")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split(Generic[T]):
    """Something for each of training, validation and test: documents, ranges of blocks, blocks."""

    train: T
    validation: T
    test: T

    def map(self, function: Callable[[T], U]) -> "Split[U]":
        """The split of the function's results."""
        return Split(function(self.train), function(self.validation), function(self.test))


class Fingerprint:
    """By which a text is known again and finds its place in the split, taken as the text is read.

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int) -> None:
        self._text = hashlib.sha256()
        self._order = hashlib.sha256(f"{seed}:".encode())
        self.characters = 0

    def update(self, text: str) -> None:
        """Take in the next part of the text."""
        data = text.encode()
        self._text.update(data)
        self._order.update(data)
        self.characters += len(text)

    @property
    def digest(self) -> int:
        """The text's name, 64 bits: as ``Document.digest``."""
        return int.from_bytes(self._text.digest()[:8], "big")

    @property
    def place(self) -> int:
        """Where the text comes among all texts, 64 bits."""
        return int.from_bytes(self._order.digest()[:8], "big")


def by_document(documents: list[Document], seed: int | None = None) -> Split[list[Document]] | None:
    """Divide 80/10/10 by characters, each document as a whole; each part keeps the corpus's order. See ``assign``."""
    prints = [Fingerprint(SPLIT_SEED if seed is None else seed) for _ in documents]
    for fingerprint, document in zip(prints, documents, strict=True):
        fingerprint.update(document.text)
    numbers = assign(
        np.array([fingerprint.place for fingerprint in prints], np.uint64),
        np.array([fingerprint.characters for fingerprint in prints], np.uint64),
    )
    return None if numbers is None else numbers.map(lambda part: [documents[i] for i in part.tolist()])


def assign(places: NDArray[np.uint64], characters: NDArray[np.uint64]) -> Split[NDArray[np.int64]] | None:
    """Divide documents 80/10/10 by characters.

    Equal texts, which have the same place, count as one, so all copies fall on one side. Texts are taken in the order
    of their places; one that fits into what the part that lacks most still lacks goes there, any other to training. A
    text's place thus hangs on the texts and not on their order or names.

    Args:
        places: of the documents' texts in the seeded order, (documents,); those of different texts differ.
        characters: of the same texts.

    Returns:
        The numbers of the documents of each part, rising. None, with the reason logged, where the documents cannot be
        divided: fewer than ``MIN_DOCUMENTS``, one with more than half of the characters, or lengths of which no tenth
        can be put together.
    """
    total, n_texts, longest = int(characters.sum()), 0, 0
    lacking = {1: total // 10, 2: total // 10}
    order = np.argsort(places, kind="stable")
    in_order, begin = np.zeros(len(order), np.int8), 0
    for copies, size in _texts(places, characters, order):
        n_texts, longest = n_texts + 1, max(longest, size)
        neediest = 1 if lacking[1] >= lacking[2] else 2
        if size <= lacking[neediest]:
            in_order[begin : begin + copies] = neediest
            lacking[neediest] -= size
        begin += copies
    sides = np.empty_like(in_order)
    sides[order] = in_order
    if n_texts < MIN_DOCUMENTS:
        reason = f"there are {n_texts} different documents, fewer than {MIN_DOCUMENTS}"
    elif 2 * longest > total:
        reason = f"one document holds {longest / total:.0%} of the characters"
    elif max(lacking.values()) > total // 20:
        reason = "the documents are too few and too uneven in length to set a tenth apart"
    else:
        return Split(*(np.flatnonzero(sides == side) for side in range(3)))
    _log.info("%s: the last blocks are held out instead, a block's gap before validation and before test", reason)
    return None


def _texts(
    places: NDArray[np.uint64], characters: NDArray[np.uint64], order: NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """How many copies each text has, and their characters together, in order of their places."""
    some = (order[begin : begin + AT_A_TIME] for begin in range(0, len(order), AT_A_TIME))
    entries = chain.from_iterable(zip(places[n].tolist(), characters[n].tolist(), strict=True) for n in some)
    for _, copies in groupby(entries, key=itemgetter(0)):
        number = size = 0
        for _, length in copies:
            number, size = number + 1, size + length
        yield number, size


def by_block(n_blocks: int) -> Split[range]:
    """Divide consecutive blocks: the first 80 % for training, then 10 % and 10 %, with a block left out before
    each of the two, so that no held-out text goes on from text just before it. Needs ``MIN_BLOCKS`` blocks.
    """
    assert n_blocks >= MIN_BLOCKS, n_blocks
    held_out = (n_blocks - 2) // 10
    validation = n_blocks - 1 - 2 * held_out  # training is a block shorter: the gap
    test = n_blocks - held_out
    return Split(range(validation - 1), range(validation, validation + held_out), range(test, n_blocks))
