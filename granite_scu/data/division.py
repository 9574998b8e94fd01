"""A corpus read and divided, and the record by which its documents are known again after training."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from granite_scu.config import DataConfig
from granite_scu.data.cache import Prepared
from granite_scu.data.documents import Document
from granite_scu.data.sources import drop_empty, load, published
from granite_scu.data.splits import Split, assign, by_document

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
    return "document" if parts else "block", parts


def without_copies(corpus: Prepared, parts: Split[NDArray[np.int64]]) -> Split[NDArray[np.int64]]:
    """The splits that a data set comes in, without the training documents that it holds out as well."""
    held_out = corpus.digests[np.concatenate([parts.validation, parts.test])]
    copied = np.isin(corpus.digests[parts.train], held_out)
    if copied.any():
        _log.warning("train: left out %d documents that validation or test have too", np.count_nonzero(copied))
    return replace(parts, train=parts.train[~copied])


def recorded(corpus: Prepared, by: str, parts: Split[NDArray[np.int64]] | None) -> dict[str, Any]:
    """The documents of each split, for JSON."""
    hexadecimal = [f"{digest:016x}" for digest in corpus.digests.tolist()]
    if parts is None:
        return as_record(by, Split([], [], []), shared=hexadecimal)
    return as_record(by, parts.map(lambda numbers: [hexadecimal[i] for i in numbers.tolist()]))


def as_record(by: str, parts: Split[list[str]], shared: Sequence[str] = (), streamed: bool = False) -> dict[str, Any]:
    """Which documents a run had, as ``documents.json``.

    Args:
        by: as in ``Division``.
        parts: digests of the documents of each split.
        shared: digests of the documents that several splits have a part of.
        streamed: whether training read more documents, of which there is no record.
    """
    return {
        "schema": 1,
        "digest": "the first 16 hexadecimal digits of the SHA-256 of a text in UTF-8",
        "split_by": by,
        **{name: getattr(parts, name) for name in SPLITS},
        "shared": list(shared),
        "streamed": streamed,
    }


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
