"""A corpus read and divided, and the record by which its documents are known again after training."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from granite_scu.config.settings import DataConfig
from granite_scu.data.blocks.splitting import AT_A_TIME, Split, assign, by_document
from granite_scu.data.sources.documents import Document
from granite_scu.data.sources.read import drop_empty, load, published
from granite_scu.data.tokens.cache import Prepared
from granite_scu.errors import UserError

SPLITS = ("train", "validation", "test")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Division:
    """What a run reads, with its texts.

    Attributes:
        by: "published" (as the corpus comes), "document", or "block" where documents are too few to be divided.
        parts: the documents of each split; None when they are divided by block.
        documents: all of them.
        n_empty: texts left out because nothing stands in them.
    """

    by: str
    parts: Split[list[Document]] | None
    documents: list[Document]
    n_empty: int


def divided(corpus: Prepared, config: DataConfig) -> tuple[str, Split[NDArray[np.int64]] | None]:
    """How a run's corpus is divided, and the documents of each part, by number; as ``divide``, without their texts."""
    if published(config.path, config.text_column) is not None:
        return "published", without_copies(corpus, Split(*(np.flatnonzero(corpus.sources == n) for n in range(3))))
    parts = assign(corpus.places, corpus.characters)
    if parts is None and (n_copies := corpus.n_documents - len(np.unique(corpus.digests))):
        _log.warning(
            "%d of the %d documents are copies of others; as they are not divided by document, what is held out may be "
            "trained on as well: leave the copies out",
            *(n_copies, corpus.n_documents),
        )
    return "document" if parts else "block", parts


def without_copies(corpus: Prepared, parts: Split[NDArray[np.int64]]) -> Split[NDArray[np.int64]]:
    """The splits that a data set comes in, without the validation documents that test has as well, and without the
    training documents that either has."""
    validation = _not_in(corpus, "validation", parts.validation, parts.test, "test has")
    held_out = np.concatenate([parts.validation, parts.test])
    train = _not_in(corpus, "train", parts.train, held_out, "validation or test have")
    return replace(parts, train=train, validation=validation)


def _not_in(
    corpus: Prepared, name: str, documents: NDArray[np.int64], others: NDArray[np.int64], who: str
) -> NDArray[np.int64]:
    """The documents of a split whose text none of the others has."""
    copied = np.isin(corpus.digests[documents], corpus.digests[others])
    if copied.any() and copied.all():
        raise UserError(
            f"--data-dir: every document of the {name} split is one that {who} too; give it others, or the training "
            "split alone, which is then divided"
        )
    if copied.any():
        _log.warning("%s: left out %d documents that %s too", name, np.count_nonzero(copied), who)
    return documents[~copied]


def recorded(corpus: Prepared, by: str, parts: Split[NDArray[np.int64]] | None) -> Iterator[str]:
    """The documents of each split, as ``as_record``."""

    def hexadecimal(numbers: NDArray[np.int64]) -> Iterator[str]:
        some = (numbers[begin : begin + AT_A_TIME] for begin in range(0, len(numbers), AT_A_TIME))
        return (f"{digest:016x}" for n in some for digest in corpus.digests[n].tolist())

    if parts is None:
        return as_record(by, Split([], [], []), shared=hexadecimal(np.arange(corpus.n_documents)))
    return as_record(by, parts.map(hexadecimal))


def as_record(
    by: str, parts: Split[Iterable[str]], shared: Iterable[str] = (), streamed: bool = False
) -> Iterator[str]:
    """Which documents a run had, as the text of ``documents.json`` a line at a time: they may be millions.

    Args:
        by: as in ``Division``.
        parts: digests of the documents of each split.
        shared: digests of the documents that several splits have a part of.
        streamed: whether training read more documents, of which there is no record.
    """
    facts = {
        "schema": 1,
        "digest": "the first 16 hexadecimal digits of the SHA-256 of a text in UTF-8",
        "split_by": by,
        "streamed": streamed,
    }
    yield json.dumps(facts, indent=2).removesuffix("\n}")
    for name, digests in [*((name, getattr(parts, name)) for name in SPLITS), ("shared", shared)]:
        yield f',\n  "{name}": ['
        for number, digest in enumerate(digests):
            yield f'{"," if number else ""}\n    "{digest}"'
        yield "\n  ]"
    yield "\n}\n"


def divide(config: DataConfig) -> Division:
    """Read the corpus of a run and divide it; equal text gives an equal division.

    Raises:
        UserError: nothing to read, or a file that cannot be read.
    """
    splits = published(config.path, config.text_column)
    if splits is not None:
        parts, counts = zip(*(drop_empty(list(getattr(splits, name)())) for name in SPLITS), strict=True)
        return Division("published", Split(*parts), [document for part in parts for document in part], sum(counts))
    documents, n_empty = drop_empty(load(config.path, config.text_column, config.encoding))
    parts = by_document(documents, config.split_seed)
    return Division("document" if parts else "block", parts, documents, n_empty)


def digests(documents: Iterable[Document]) -> list[str]:
    return [document.digest for document in documents]
