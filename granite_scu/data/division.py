"""A corpus read and divided, and the record by which its documents are known again after training."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from granite_scu.config import DataConfig
from granite_scu.data.documents import Document
from granite_scu.data.sources import drop_empty, load, load_wikitext
from granite_scu.data.splits import Split, by_document


@dataclass(frozen=True)
class Division:
    """What a run reads.

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

    def record(self) -> dict[str, Any]:
        """The documents of each split by digest, for JSON; ``shared`` are those that several splits have a part of."""
        parts = self.parts or Split([], [], [])
        return {
            "schema": 1,
            "digest": "the first 16 hexadecimal digits of the SHA-256 of a text in UTF-8",
            "split_by": self.by,
            "train": digests(parts.train),
            "validation": digests(parts.validation),
            "test": digests(parts.test),
            "shared": digests(self.documents) if self.parts is None else [],
        }


def divide(config: DataConfig) -> Division:
    """Read the corpus of a run and divide it; equal text gives an equal division.

    Raises:
        UserError: nothing to read, or a file that cannot be read.
    """
    if config.path is None:
        published = load_wikitext()
        return Division("published", published, [*published.train, *published.validation, *published.test], 0)
    documents, n_empty = drop_empty(load(config.path, config.text_column, config.encoding))
    parts = by_document(documents)
    return Division("document" if parts else "block", parts, documents, n_empty)


def digests(documents: Iterable[Document]) -> list[str]:
    return [document.digest for document in documents]
