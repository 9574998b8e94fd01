"""Training, validation and test: by whole documents, or by blocks where documents are too few.

The division does not depend on the run's seed, so that runs with different seeds are compared on the
same held-out text.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from granite_scu.config.errors import UserError
from granite_scu.control.units import counted
from granite_scu.data.sources.documents import SPLITS
from granite_scu.data.tokens.cache import Prepared

MIN_DOCUMENTS = 10
"""Different texts below which a corpus is not divided by document."""
MIN_BLOCKS = 12
"""Blocks below which ``by_block`` has nothing to hold out: a tenth of the rest is less than one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Division:
    """Which documents of a corpus are in which split.

    Attributes:
        corpus: all documents.
        by: "published" (as the corpus comes), "document", or "block" where documents are too few to be divided.
        parts: the numbers of the documents of each split, by its name; None when they are divided by block.
        streamed: whether training reads more documents, of which there is no record.
    """

    corpus: Prepared
    by: str
    parts: dict[str, NDArray[np.int64]] | None
    streamed: bool = False

    @property
    def n_copies(self) -> int:
        """Documents that are in no split, as another one has them."""
        return 0 if self.parts is None else self.corpus.n_documents - sum(map(len, self.parts.values()))

    def record(self) -> Iterator[str]:
        """Which documents a run had, as the text of ``documents.json`` a line at a time: they may be millions.

        Those that several splits have a part of are ``shared``.
        """
        facts = {
            "schema": 1,
            "digest": "the first 16 hexadecimal digits of the SHA-256 of a text in UTF-8",
            "split_by": self.by,
            "streamed": self.streamed,
        }
        yield json.dumps(facts, indent=2).removesuffix("\n}")
        every = np.arange(self.corpus.n_documents)
        parts = dict.fromkeys((*SPLITS, "shared"), every[:0])
        parts |= {"shared": every} if self.parts is None else self.parts
        if self.streamed:
            parts["train"] = every[:0]
        for name, documents in parts.items():
            yield f',\n  "{name}": ['
            for number, document in enumerate(documents):
                yield f'{"," if number else ""}\n    "{self.corpus.digests[document]:016x}"'
            yield "\n  ]"
        yield "\n}\n"


def divide(corpus: Prepared, is_published: bool, streamed: bool = False) -> Division:
    """Divide a corpus; equal text gives an equal division.

    Args:
        corpus: its documents; of one that comes divided, those of each split are a source.
        is_published: whether it comes divided.
        streamed: whether it is the beginning of a stream.

    Raises:
        UserError: a split has nothing that no split after it has.
    """
    if is_published:
        return _as_published(corpus, streamed)
    parts = assign(corpus.places, corpus.characters, corpus.bare)
    if parts is None and (n_copies := corpus.n_documents - len(np.unique(corpus.bare))):
        _log.warning(
            "%d of the %d documents are copies of others; as they are not divided by document, what is held out may be "
            "trained on as well: leave the copies out",
            *(n_copies, corpus.n_documents),
        )
    return Division(corpus, "document" if parts else "block", parts, streamed)


def _as_published(corpus: Prepared, streamed: bool) -> Division:
    """The splits that a data set comes in, its sources, without the validation documents that test has as well, and
    without the training documents that either has; of a stream, those are passed over as they come."""
    train, validation, test = (np.flatnonzero(corpus.sources == number) for number in range(len(SPLITS)))
    held_out = np.concatenate([validation, test])
    validation = _not_in(corpus.bare, "validation", validation, test, "test has")
    if not streamed:
        train = _not_in(corpus.bare, "train", train, held_out, "validation or test have")
    return Division(corpus, "published", dict(zip(SPLITS, (train, validation, test), strict=True)), streamed)


def _not_in(
    digests: NDArray[np.uint64], name: str, documents: NDArray[np.int64], others: NDArray[np.int64], who: str
) -> NDArray[np.int64]:
    """The documents of a split whose text none of the others has."""
    copied = np.isin(digests[documents], digests[others])
    if copied.any() and copied.all():
        raise UserError(
            f"--data-dir: every document of the {name} split is one that {who} too; give it others, or the training "
            "split alone, which is then divided"
        )
    if copied.any():
        _log.warning("%s: left out %d documents that %s too", name, np.count_nonzero(copied), who)
    return documents[~copied]


def assign(
    places: NDArray[np.uint64], characters: NDArray[np.uint64], texts: NDArray[np.uint64]
) -> dict[str, NDArray[np.int64]] | None:
    """Divide documents 80/10/10 by characters.

    Copies of a text count as one, so all fall on one side. Texts are taken in the order of their places, copies at the
    first of theirs; one that fits into what the part that lacks most still lacks goes there, any other to training. A
    text's side thus depends on the texts and not on their order or names.

    Args:
        places: of the documents' texts in the seeded order, (documents,).
        characters: of the same texts.
        texts: numbers that copies have in common.

    Returns:
        The numbers of the documents of each part, rising. None, with the reason logged, where the documents cannot be
        divided: fewer than ``MIN_DOCUMENTS``, one with more than half of the characters, or lengths of which no tenth
        can be put together.
    """
    different, owners = np.unique(texts, return_inverse=True)
    sizes = np.bincount(owners, characters, len(different)).astype(np.int64)  # of the copies of a text together
    firsts = np.full(len(different), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(firsts, owners, places)
    total, longest = int(sizes.sum()), int(sizes.max(initial=0))
    lacking = {1: total // 10, 2: total // 10}
    sides = np.zeros(len(different), np.int8)
    for number in np.argsort(firsts):
        size = int(sizes[number])
        neediest = 1 if lacking[1] >= lacking[2] else 2
        if size <= lacking[neediest]:
            sides[number] = neediest
            lacking[neediest] -= size
    if len(different) < MIN_DOCUMENTS:
        reason = f"the text has {counted(len(different), 'different document')}, fewer than {MIN_DOCUMENTS}"
    elif 2 * longest > total:
        reason = f"one document holds {longest / total:.0%} of the characters"
    elif max(lacking.values()) > total // 20:
        reason = "the documents are too few and too uneven in length to set a tenth apart"
    else:
        return {name: np.flatnonzero(sides[owners] == side) for side, name in enumerate(SPLITS)}
    _log.info("%s: the last blocks are held out instead, a block's gap before validation and before test", reason)
    return None


def by_block(n_blocks: int) -> dict[str, range]:
    """Divide consecutive blocks: the first 80 % for training, then 10 % and 10 %, with a block left out before
    each of the two, so that no held-out text continues text just before it. Needs ``MIN_BLOCKS`` blocks.
    """
    assert n_blocks >= MIN_BLOCKS, n_blocks
    held_out = (n_blocks - 2) // 10
    validation = n_blocks - 1 - 2 * held_out  # training is a block shorter: the gap
    test = n_blocks - held_out
    parts = range(validation - 1), range(validation, validation + held_out), range(test, n_blocks)
    return dict(zip(SPLITS, parts, strict=True))
