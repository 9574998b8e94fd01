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
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from granite_scu.config.settings import IGNORED
from granite_scu.data.tokens.stream import PIECE, StoredArray, Stream, in_pieces

GROUP = 8192
"""Blocks that are counted at a time."""

LEAST_IN_ROUND = 4
"""Blocks that a round of packing fills at least: its last one is half empty."""

NONE = -1
"""No bin, among their numbers."""


class Block(NamedTuple):
    """One row of a batch, (block_size,) int32 each.

    Attributes:
        inputs: tokens, padded at the end.
        labels: the token that each position predicts; ``IGNORED`` at positions that are not learned.
        documents: numbers, in the block, of the document that each position belongs to; padding has the last one's.
    """

    inputs: NDArray[np.int32]
    labels: NDArray[np.int32]
    documents: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Documents one after the other, cut every ``block_size`` tokens: worked out when it is asked for, since a long
    text has so many blocks that their places alone would fill the memory.

    Attributes:
        bounds: (documents, 2) where in the stream each begins, and ends after its end of text.
        block_size: tokens in a block.
    """

    bounds: NDArray[np.int64]
    block_size: int

    @cached_property
    def begins(self) -> NDArray[np.int64]:
        """(documents + 1,) where in the row each document begins, and the row's length."""
        return np.append(0, (self.bounds[:, 1] - self.bounds[:, 0]).cumsum())

    @property
    def n_blocks(self) -> int:
        return max(0, -(-(int(self.begins[-1]) - 1) // self.block_size))  # no block for the last token, a mere label

    def spans(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The spans of the blocks ``first`` to ``last - 1``.

        Returns:
            (spans, 2) first position in the stream and the one after the last, each within a document; and
            (last - first + 1,) the first span of each block among them, and their number.
        """
        borders = np.arange(first, last + 1) * self.block_size
        end = min(int(self.begins[-1]), int(borders[-1]))
        inside = slice(*np.searchsorted(self.begins, (borders[0], end)))
        cuts = np.union1d(self.begins[inside], borders[borders < end])
        owners = np.searchsorted(self.begins, cuts, "right") - 1
        starts = self.bounds[owners, 0] + cuts - self.begins[owners]
        stops = starts + np.diff(np.append(cuts, end))
        return np.stack([starts, stops], 1), np.searchsorted(cuts, borders)


@dataclass(frozen=True, eq=False)
class Bins:
    """Documents in bins, all of which differ.

    Attributes:
        every: (spans, 2) of all blocks, one after the other.
        firsts: (blocks + 1,) int64, the first span of each block, and the number of spans.
    """

    every: NDArray[np.int64]
    firsts: NDArray[np.int64]

    @property
    def n_blocks(self) -> int:
        return len(self.firsts) - 1

    def spans(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As of ``PackedRow``."""
        firsts = self.firsts[first : last + 1]
        return self.every[firsts[0] : firsts[-1]], firsts - firsts[0]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a stream, a map-style data set for torch's DataLoader.

    Attributes:
        stream: the tokens, shared between the parts of a stream.
        block_size: L, tokens in a block.
        padding: token id that fills up blocks.
        cuts: the spans of all blocks.
        numbers: which of these blocks are meant, evenly spaced.
    """

    stream: Stream
    block_size: int
    padding: int
    cuts: PackedRow | Bins
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

    def select(self, numbers: range) -> "Blocks":
        """The blocks numbered so among these; the stream is shared, not copied."""
        return replace(self, numbers=self.numbers[numbers.start : numbers.stop : numbers.step])

    def checksum(self) -> str:
        """Of the tokens and of how they are cut, a few hexadecimal digits: equal blocks in the same order."""
        digest = hashlib.sha256(repr((self.block_size, self.padding, self.numbers)).encode())
        for of_stream in (self.stream.tokens, self.stream.targets):
            for piece in in_pieces(of_stream):
                digest.update(np.ascontiguousarray(piece))
        everything = replace(self, numbers=range(self.cuts.n_blocks))
        for spans, _ in everything._groups():
            digest.update(np.ascontiguousarray(spans))
        n_spans = 0
        for _, firsts in everything._groups():
            digest.update(firsts[:-1] + n_spans)
            n_spans += int(firsts[-1])
        digest.update(np.array([n_spans]))
        return digest.hexdigest()[:16]

    @property
    def n_blocks(self) -> int:
        return len(self)

    @cached_property
    def n_inputs(self) -> int:
        """Tokens that are inputs; padding is not counted."""
        return sum(int((spans[:, 1] - spans[:, 0]).sum()) for spans, _ in self._groups())

    @cached_property
    def n_supervised(self) -> int:
        """Tokens that are predicted: labels other than ``IGNORED``."""
        return sum(int(np.count_nonzero(self.stream.targets[part])) for part in self._predicted())

    @cached_property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text that the supervised tokens stand for."""
        widths, targets = self.stream.widths, self.stream.targets
        return sum(int(widths[part].sum(dtype=np.int64, where=targets[part])) for part in self._predicted())

    @cached_property
    def seen(self) -> NDArray[np.bool_]:
        """(documents of the stream,) whether a token of it is among the inputs."""
        seen = np.zeros(len(self.stream.ends), bool)
        for spans, _ in self._groups():
            seen[np.searchsorted(self.stream.ends, spans[:, 0])] = True
        return seen

    @property
    def n_documents(self) -> int:
        """Documents that have a token among the inputs."""
        return int(np.count_nonzero(self.seen))

    @property
    def utilisation(self) -> float:
        """Share of the blocks' positions that are not padding."""
        return self.n_inputs / max(1, len(self) * self.block_size)

    def spans_of(self, index: int) -> NDArray[np.int64]:
        """The stretches of the stream that a block is made of, (spans, 2)."""
        number = self.numbers[index]
        return self.cuts.spans(number, number + 1)[0]

    def _groups(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The spans of the blocks that are meant, as of ``PackedRow``, of some thousand blocks at a time."""
        step = self.numbers.step
        for begin in range(0, len(self), max(1, GROUP // step)):
            some = self.numbers[begin : begin + max(1, GROUP // step)]
            spans, firsts = self.cuts.spans(some[0], some[-1] + 1)
            if step > 1:
                counts = np.diff(firsts)
                chosen = np.arange(len(counts)) % step == 0
                spans, firsts = spans[np.repeat(chosen, counts)], np.append(0, counts[chosen].cumsum())
            yield spans, firsts

    def _predicted(self) -> Iterator[slice]:
        """The stream's tokens that are predicted, in slices of at most ``PIECE``."""
        for spans, _ in self._groups():
            new = np.flatnonzero(np.append(True, spans[1:, 0] != spans[:-1, 1]))
            stops = spans[np.append(new[1:], len(spans)) - 1, 1]
            for start, stop in zip(spans[new, 0].tolist(), stops.tolist(), strict=True):
                yield from (slice(at + 1, min(at + PIECE, stop) + 1) for at in range(start, stop, PIECE))


def padding_of(tokenizer: PreTrainedTokenizerBase, rows: int | None = None) -> int:
    """What fills up a block: never a label, so that end of text may stand for it without harm.

    It does where the tokenizer has no padding, or one that was added to it and that a model of ``rows`` tokens lacks.
    """
    padding = tokenizer.pad_token_id
    return tokenizer.eos_token_id if padding is None or (rows and padding >= rows) else padding


Layout: TypeAlias = Callable[[Stream, NDArray[np.int64], int, int], Blocks]
"""Makes blocks of the documents of a stream: ``in_a_row`` or ``best_fit``."""


def in_a_row(stream: Stream, bounds: NDArray[np.int64], block_size: int, padding: int) -> Blocks:
    """The documents one after the other, cut every ``block_size`` tokens.

    Args:
        stream: the tokens.
        bounds: (documents, 2) where in the stream each begins, and ends after its end of text; any order, any times.
        block_size: tokens in a block.
        padding: token id that fills up the last block.
    """
    # The last token of a document that was cut short is predicted, and would predict what was cut off.
    is_cut = bounds[:, 1] <= stream.ends[np.searchsorted(stream.ends, bounds[:, 0])]
    if is_cut.any():
        bounds = bounds - np.stack([np.zeros_like(is_cut), is_cut], 1)
    row = PackedRow(bounds, block_size)
    return Blocks(stream, block_size, padding, row, range(row.n_blocks))


def best_fit(stream: Stream, bounds: NDArray[np.int64], block_size: int, padding: int) -> Blocks:
    """Each document in one piece, as many as fit into a block. As ``in_a_row``.

    A document that is longer than a block is cut, and its end packed like another document. What has no supervised
    token is left out, as is the end of text as an input, which predicts nothing. Copies of a document come in different
    blocks, where there are enough: as long as each other, they would lie side by side, and a batch would have little
    else.
    """
    pieces = _pieces(stream.targets, bounds, block_size)
    n_blocks = int(np.diff(pieces).sum()) // block_size
    bins, rounds = np.zeros(len(pieces), np.int32), _rounds(pieces[:, 0], most=n_blocks // LEAST_IN_ROUND)
    for number in range(rounds.max(initial=-1) + 1):
        of_round, n_before = rounds == number, bins.max() + 1 if number else 0
        bins[of_round] = n_before + _best_fit_decreasing(np.diff(pieces[of_round])[:, 0], block_size)
    # Blocks in the order of the text, so that the first are like the others; and so the pieces of each.
    numbers = np.arange(len(bins), dtype=bins.dtype)
    first_of = np.zeros(bins.max(initial=-1) + 1, bins.dtype)
    first_of[bins[::-1]] = numbers[::-1]
    rank_of = np.empty_like(first_of)
    rank_of[first_of.argsort()] = np.arange(len(first_of))
    blocks = rank_of[bins]
    cuts = Bins(pieces[blocks.argsort(kind="stable")], np.append(0, np.bincount(blocks).cumsum()))
    return Blocks(stream, block_size, padding, cuts, range(cuts.n_blocks))


def _pieces(targets: NDArray[np.bool_] | StoredArray, bounds: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """(pieces, 2) what predicts something supervised, in stretches of a document as long as fit into a block."""
    counts = -(-(bounds[:, 1] - 1 - bounds[:, 0]) // block_size)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    starts = np.repeat(bounds[:, 0], counts) + within * block_size
    stops = np.minimum(starts + block_size, np.repeat(bounds[:, 1] - 1, counts))
    learned = (targets[start + 1 : stop + 1].any() for start, stop in zip(starts, stops, strict=True))
    return np.stack([starts, stops], 1)[np.fromiter(learned, bool, len(starts))]


def _rounds(starts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """In which of as many rounds as there are copies of a piece each is packed: no two copies in one, and evenly.

    Args:
        starts: (pieces,) where in the stream each begins.
        most: rounds at most; where there are more copies, a round has several.

    >>> _rounds(np.array([0, 10, 20, 30, 10, 30]), most=9).tolist()
    [0, 1, 0, 1, 0, 0]
    """
    order = np.argsort(starts, kind="stable")
    _, numbers, counts = np.unique(starts, return_inverse=True, return_counts=True)
    copies = np.empty_like(order)
    copies[order] = np.arange(len(order)) - np.searchsorted(starts[order], starts[order])
    most = max(1, min(most, int(counts.max(initial=1))))
    found: NDArray[np.int64] = (numbers + copies * most // counts[numbers]) % most
    return found


def _best_fit_decreasing(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int32]:
    """Items in bins: each, the largest first, goes where it leaves the least room. Takes some bytes an item.

    Args:
        sizes: (items,) from 1 to the capacity.
        capacity: of every bin.

    Returns:
        (items,) the number of the bin of each.

    >>> _best_fit_decreasing(np.array([3, 6, 4, 5]), 9).tolist()
    [0, 0, 1, 1]
    """
    bins = np.zeros(len(sizes), np.int32)
    # Bins with the same room are a stack: its top by room, and for each bin the one below it. Python has no objects
    # for what lies in arrays and views of them until it is asked for, and text may have millions of documents.
    top: dict[int, int] = {}
    below = array("i")
    rooms: list[int] = []  # of the bins that have any, rising
    size_of, bin_of = memoryview(sizes), memoryview(bins)
    for item in memoryview(np.argsort(-sizes, kind="stable")):
        size = size_of[item]
        at = bisect_left(rooms, size)
        if at == len(rooms):
            number, room = len(below), capacity
            below.append(NONE)
        else:
            room = rooms[at]
            number = top.pop(room)
            if below[number] == NONE:
                del rooms[at]
            else:
                top[room] = below[number]
        bin_of[item] = number
        if left := room - size:
            if left not in top:
                insort(rooms, left)
            below[number], top[left] = top.get(left, NONE), number
    return bins
