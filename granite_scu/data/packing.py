"""From a stream of tokens to blocks of equal length.

A block is a row of spans of the stream, each within a document. A position's input is its token and its label the token
after it, so labels are shifted already and never cross into another document. Two layouts:

``in_a_row``  documents one after the other, cut every ``block_size`` tokens, as text is trained on: no token is
              dropped and nothing padded but the end of the last block.
``best_fit``  each document in one piece, longest first into the fullest block that still has room (best-fit decreasing;
              Ding et al. 2024, arXiv 2404.10830): for chats, which should not be cut. Room left over is padded.

Every token but a document's first is predicted exactly once in both, where it is supervised.
"""

import hashlib
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from granite_scu.data.documents import Document
from granite_scu.data.encoding import Stream, encode

IGNORED = -100
"""The label of a position that predicts nothing, as torch's cross-entropy has it."""


class Block(NamedTuple):
    """One row of a batch, (block_size,) int32 each.

    Attributes:
        inputs: tokens, padded at the end.
        labels: the token that each position predicts; ``IGNORED`` where none is supervised.
        documents: numbers, in the block, of the document that each position belongs to; padding has the last one's.
    """

    inputs: NDArray[np.int32]
    labels: NDArray[np.int32]
    documents: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a stream, a map-style data set for torch's DataLoader.

    Attributes:
        stream: the tokens, shared between the parts of a stream.
        block_size: L, tokens in a block.
        padding: token id that fills up blocks.
        spans: (spans, 2) int64, first position in the stream and the one after the last; each within a document.
        firsts: (blocks + 1,) int64, the first span of each block, and the number of spans.
        numbers: which of these blocks are meant, evenly spaced.
    """

    stream: Stream
    block_size: int
    padding: int
    spans: NDArray[np.int64]
    firsts: NDArray[np.int64]
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Block:
        """One block. Raises IndexError beyond the last."""
        inputs = np.full(self.block_size, self.padding, np.int32)
        labels = np.full(self.block_size, IGNORED, np.int32)
        documents = np.zeros(self.block_size, np.int32)
        at = 0
        for number, (start, stop) in enumerate(self.spans_of(index)):
            inputs[at : at + stop - start] = self.stream.tokens[start:stop]
            following = slice(start + 1, stop + 1)  # which the stream's last token has none of
            seen = np.where(self.stream.targets[following], self.stream.tokens[following], IGNORED)
            labels[at : at + len(seen)] = seen
            documents[at:] = number
            at += stop - start
        return Block(inputs, labels, documents)

    def documents(self, index: int) -> NDArray[np.int64]:
        """The stream's document, by number, that each position of a block predicts from, (block_size,).

        Meaningless where the label is ``IGNORED``: a supervised position and its label lie in the same document.
        """
        spans = self.spans_of(index)
        owners = np.repeat(np.searchsorted(self.stream.ends, spans[:, 0]), spans[:, 1] - spans[:, 0])
        return np.append(owners, np.zeros(self.block_size - len(owners), np.int64))

    def part(self, numbers: range) -> "Blocks":
        """The blocks numbered so among these; the stream is shared, not copied."""
        return replace(self, numbers=self.numbers[numbers.start : numbers.stop : numbers.step])

    def checksum(self) -> str:
        """Of the tokens and of how they are cut, a few hexadecimal digits: equal blocks in the same order."""
        digest = hashlib.sha256(repr((self.block_size, self.padding, self.numbers)).encode())
        for array in (self.stream.tokens, self.stream.targets, self.spans, self.firsts):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()[:16]

    @property
    def n_blocks(self) -> int:
        return len(self)

    @cached_property
    def n_inputs(self) -> int:
        """Tokens that are inputs; padding is not counted."""
        return int((self._chosen[:, 1] - self._chosen[:, 0]).sum())

    @cached_property
    def n_supervised(self) -> int:
        """Tokens that are predicted: labels other than ``IGNORED``."""
        return sum(int(np.count_nonzero(self.stream.targets[part])) for part in self._predicted)

    @cached_property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text that the supervised tokens stand for."""
        widths, targets = self.stream.widths, self.stream.targets
        return sum(int(widths[part].sum(dtype=np.int64, where=targets[part])) for part in self._predicted)

    @cached_property
    def n_documents(self) -> int:
        """Documents that have a token among the inputs."""
        return len(np.unique(np.searchsorted(self.stream.ends, self._chosen[:, 0])))

    @property
    def utilisation(self) -> float:
        """Share of the blocks' positions that are not padding."""
        return self.n_inputs / (len(self) * self.block_size)

    def spans_of(self, index: int) -> NDArray[np.int64]:
        """The stretches of the stream that a block is made of, (spans, 2)."""
        number = self.numbers[index]
        return self.spans[self.firsts[number] : self.firsts[number + 1]]

    @cached_property
    def _chosen(self) -> NDArray[np.int64]:
        """The spans of all blocks that are meant."""
        blocks = np.repeat(np.arange(len(self.firsts) - 1), np.diff(self.firsts))
        chosen = np.zeros(len(self.firsts) - 1, bool)
        chosen[self.numbers.start : self.numbers.stop : self.numbers.step] = True
        return self.spans[chosen[blocks]]

    @property
    def _predicted(self) -> list[slice]:
        """The stream's tokens that are predicted, in as few slices as they make."""
        spans = self._chosen
        new = np.flatnonzero(np.append(True, spans[1:, 0] != spans[:-1, 1])) if len(spans) else np.zeros(0, int)
        stops = spans[np.append(new[1:], len(spans)) - 1, 1] if len(spans) else new
        return [slice(start + 1, stop + 1) for start, stop in zip(spans[new, 0], stops, strict=True)]


def pack(
    documents: list[Document], tokenizer: PreTrainedTokenizerBase, block_size: int, show_progress: bool = True
) -> Blocks:
    """All blocks of the documents in a row, in their order.

    Args:
        documents: at least one.
        tokenizer: its end-of-text token ends each document; pads with that too where it has no padding token.
        block_size: tokens in a block.
        show_progress: show a bar on stderr when the text is long.

    Raises:
        UserError: the tokenizer has no end-of-text token.
    """
    stream = encode(documents, tokenizer, show_progress)
    return in_a_row(stream, stream.bounds, block_size, padding_of(tokenizer))


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills up a block: never a label, so that end of text may stand for it without harm."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def in_a_row(stream: Stream, bounds: NDArray[np.int64], block_size: int, padding: int) -> Blocks:
    """The documents one after the other, cut every ``block_size`` tokens.

    Args:
        stream: the tokens.
        bounds: (documents, 2) where in the stream each begins, and ends after its end of text; any order, any times.
        block_size: tokens in a block.
        padding: token id that fills up the last block.
    """
    lengths = bounds[:, 1] - bounds[:, 0]
    begins = np.append(0, lengths.cumsum())  # of each document among all that are in the row, and the row's length
    n_blocks = max(0, -(-(int(begins[-1]) - 1) // block_size))  # the last token predicts nothing: no block for it alone
    borders = np.arange(n_blocks + 1) * block_size
    cuts = np.union1d(begins, borders)
    cuts = cuts[cuts < min(begins[-1], borders[-1])]
    owners = np.searchsorted(begins, cuts, "right") - 1
    starts = bounds[owners, 0] + cuts - begins[owners]
    stops = starts + np.diff(np.append(cuts, min(begins[-1], borders[-1])))
    return Blocks(
        stream, block_size, padding, np.stack([starts, stops], 1), np.searchsorted(cuts, borders), range(n_blocks)
    )


def best_fit(stream: Stream, bounds: NDArray[np.int64], block_size: int, padding: int) -> Blocks:
    """Each document in one piece, as many as fit into a block. As ``in_a_row``.

    A document that is longer than a block is cut, and its end packed like another document. What has no supervised
    token is left out, as is the end of text as an input, which predicts nothing.
    """
    pieces = [
        (piece, min(piece + block_size, stop - 1))
        for start, stop in bounds.tolist()
        for piece in range(start, stop - 1, block_size)
    ]
    pieces = [(start, stop) for start, stop in pieces if stream.targets[start + 1 : stop + 1].any()]
    sizes = np.array([stop - start for start, stop in pieces], np.int64)
    blocks = [sorted(block) for block in _best_fit_decreasing(sizes, block_size)]
    blocks.sort(key=lambda block: block[0])  # in the order of the text, so that the first are like the others
    spans = np.array([pieces[i] for block in blocks for i in block], np.int64).reshape(-1, 2)
    firsts = np.append(0, np.cumsum([len(block) for block in blocks], dtype=np.int64))
    return Blocks(stream, block_size, padding, spans, firsts, range(len(blocks)))


def _best_fit_decreasing(sizes: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Items in bins: each, the largest first, goes where it leaves the least room.

    >>> _best_fit_decreasing(np.array([3, 6, 4, 5]), 9)
    [[1, 0], [3, 2]]
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # numbers of the bins by the room that they have
    rooms: list[int] = []  # the keys of that, rising
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            number, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[at]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        bins[number].append(item)
        left = room - size
        if left and left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        if left:
            with_room[left].append(number)
    return bins
