"""Training, validation and test: by whole documents, or by blocks where documents are too few.

The division does not depend on the run's seed, so that runs with different seeds are compared on the
same held-out text.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from granite_scu.data.documents import Document

SPLIT_SEED = 0
MIN_DOCUMENTS = 10
"""Different texts below which a corpus is not divided by document."""
MIN_BLOCKS = 12
"""Blocks below which ``by_block`` has nothing to hold out: a tenth of the rest is less than one."""

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
    numbers = assign(*(np.array([getattr(f, name) for f in prints], np.uint64) for name in FACTS))
    return None if numbers is None else numbers.map(lambda part: [documents[i] for i in part.tolist()])


FACTS = ("digest", "place", "characters")
"""What of a fingerprint ``assign`` needs, in its order."""


def assign(
    digests: NDArray[np.uint64], places: NDArray[np.uint64], characters: NDArray[np.uint64]
) -> Split[NDArray[np.int64]] | None:
    """Divide documents 80/10/10 by characters.

    Equal texts count as one, so all copies fall on one side. Texts are taken in the order of a seeded hash;
    one that fits into what the part that lacks most still lacks goes there, any other to training. A text's place
    thus hangs on the texts and not on their order or names.

    Args:
        digests: of the documents' texts, (documents,).
        places: of the same texts in the seeded order.
        characters: of each.

    Returns:
        The numbers of the documents of each part, rising. None, with the reason logged, where the documents cannot be
        divided: fewer than ``MIN_DOCUMENTS``, one with more than half of the characters, or lengths of which no tenth
        can be put together.
    """
    _, first, text_of = np.unique(digests, return_index=True, return_inverse=True)
    sizes = np.bincount(text_of, characters).astype(np.int64)
    total = int(sizes.sum())
    lacking = {1: total // 10, 2: total // 10}
    sides = np.zeros(len(sizes), np.int8)
    for text in np.argsort(places[first], kind="stable").tolist():
        neediest = 1 if lacking[1] >= lacking[2] else 2
        if sizes[text] <= lacking[neediest]:
            sides[text] = neediest
            lacking[neediest] -= int(sizes[text])
    if len(sizes) < MIN_DOCUMENTS:
        reason = f"there are {len(sizes)} different documents, fewer than {MIN_DOCUMENTS}"
    elif 2 * sizes.max() > total:
        reason = f"one document holds {sizes.max() / total:.0%} of the characters"
    elif max(lacking.values()) > total // 20:
        reason = "the documents are too few and too uneven in length to set a tenth apart"
    else:
        return Split(*(np.flatnonzero(sides[text_of] == side) for side in range(3)))
    _log.info("%s: the last blocks are held out instead, a block's gap before validation and before test", reason)
    return None


def by_block(n_blocks: int) -> Split[range]:
    """Divide consecutive blocks: the first 80 % for training, then 10 % and 10 %, with a block left out before
    each of the two, so that no held-out text goes on from text just before it. Needs ``MIN_BLOCKS`` blocks.
    """
    assert n_blocks >= MIN_BLOCKS, n_blocks
    held_out = (n_blocks - 2) // 10
    validation = n_blocks - 1 - 2 * held_out  # training is a block shorter: the gap
    test = n_blocks - held_out
    return Split(range(validation - 1), range(validation, validation + held_out), range(test, n_blocks))
