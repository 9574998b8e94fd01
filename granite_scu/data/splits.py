"""Training, validation and test: by whole documents, or by blocks where documents are too few.

The division does not depend on the run's seed, so that runs with different seeds are compared on the
same held-out text.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

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


def by_document(documents: list[Document]) -> Split[list[Document]] | None:
    """Divide 80/10/10 by characters, each document as a whole; each part keeps the corpus's order.

    Equal texts count as one, so all copies fall on one side. Texts are taken in the order of a seeded hash;
    one that fits into what the part that lacks most still lacks goes there, any other to training. A text's place
    thus hangs on the texts and not on their order or names.

    Returns:
        None, with the reason logged, where the documents cannot be divided: fewer than ``MIN_DOCUMENTS``, one
        with more than half of the characters, or lengths of which no tenth can be put together.
    """
    sizes: Counter[str] = Counter()
    for document in documents:
        sizes[document.text] += len(document.text)
    total = sizes.total()
    lacking = {"validation": total // 10, "test": total // 10}
    side: dict[str, str] = {}
    for text in sorted(sizes, key=_shuffle_key):
        neediest = max(lacking, key=lambda name: lacking[name])
        side[text] = neediest if sizes[text] <= lacking[neediest] else "train"
        if side[text] != "train":
            lacking[side[text]] -= sizes[text]
    if len(sizes) < MIN_DOCUMENTS:
        reason = f"there are {len(sizes)} different documents, fewer than {MIN_DOCUMENTS}"
    elif 2 * max(sizes.values()) > total:
        reason = f"one document holds {max(sizes.values()) / total:.0%} of the characters"
    elif max(lacking.values()) > total // 20:
        reason = "the documents are too few and too uneven in length to set a tenth apart"
    else:
        parts = ([d for d in documents if side[d.text] == name] for name in ("train", "validation", "test"))
        return Split(*parts)
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


def _shuffle_key(text: str) -> bytes:
    return hashlib.sha256(f"{SPLIT_SEED}:{text}".encode()).digest()
