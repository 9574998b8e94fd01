"""General text, on which drift is measured: what the base model writes by itself, or files of the user's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from granite_scu.config.settings import IGNORED

LONGEST = 512
"""Tokens of a document; a longer text is cut into several."""

_MULTIPLE = 16
"""Rows are padded to a multiple of so many tokens: few shapes, and no convolution is wider than its input."""


@dataclass(frozen=True)
class Document:
    """A text, or a question and its answer.

    Attributes:
        tokens: its ids.
        counted: of each token whether drift is measured where it is predicted; never of the first.
    """

    tokens: tuple[int, ...]
    counted: tuple[bool, ...]

    @property
    def n_counted(self) -> int:
        """Tokens that are counted."""
        return sum(self.counted)


@dataclass(frozen=True)
class Parts:
    """General text by its use.

    Attributes:
        anchor: half of it, whose gradient keeps the model where it is.
        steering: a quarter, on which the loop measures.
        held_out: a quarter that neither of them sees, for the figures that are told.
    """

    anchor: tuple[Document, ...]
    steering: tuple[Document, ...]
    held_out: tuple[Document, ...]


@dataclass(frozen=True)
class GeneralText:
    """Documents on which drift is measured.

    Attributes:
        documents: in their order.
        source: "auto" where the base model wrote them, else the names of the files.
    """

    documents: tuple[Document, ...]
    source: str

    @property
    def n_counted(self) -> int:
        """Tokens that are counted."""
        return sum(document.n_counted for document in self.documents)

    def parts(self) -> Parts:
        """Of each four documents two to anchor, one to steer and one held out."""
        every = self.documents
        anchor = tuple(document for number, document in enumerate(every) if number % 4 < 2)
        return Parts(anchor, every[2::4], every[3::4])


def batches(documents: Sequence[Document], tokens: int, padding: int) -> list[dict[str, Tensor]]:
    """The documents in their order, as many to a batch as fit into ``tokens`` positions; one at the least.

    Args:
        documents: of two tokens at least, each.
        tokens: of a batch, padding included.
        padding: token id.

    Returns:
        ``input_ids`` and ``labels``, (rows, time) int64 each: a row a document, padded at its end to a multiple of 16;
        labels are shifted, and ``IGNORED`` where they are not counted.
    """
    return [_batch(rows, padding) for rows in _rows(documents, tokens)]


def _rows(documents: Sequence[Document], tokens: int) -> Iterator[list[Document]]:
    rows: list[Document] = []
    for document in documents:
        wider = [*rows, document]
        if rows and len(wider) * _width(wider) > tokens:
            yield rows
            wider = [document]
        rows = wider
    if rows:
        yield rows


def _width(rows: Sequence[Document]) -> int:
    return -(-(max(len(document.tokens) for document in rows) - 1) // _MULTIPLE) * _MULTIPLE


def _batch(rows: Sequence[Document], padding: int) -> dict[str, Tensor]:
    shape = len(rows), _width(rows)
    inputs, labels = torch.full(shape, padding), torch.full(shape, IGNORED)
    for row, document in enumerate(rows):
        tokens, counted = torch.tensor(document.tokens), torch.tensor(document.counted)
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, : len(tokens) - 1] = tokens[1:].masked_fill(~counted[1:], IGNORED)
    return {"input_ids": inputs, "labels": labels}
