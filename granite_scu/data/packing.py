"""From documents to blocks of tokens.

The tokens of all documents, each ended by the end-of-text token, form one stream, which is kept once and
cut into blocks as they are asked for. Block i of length L:

    inputs = stream[i L : (i + 1) L]        labels = stream[i L + 1 : (i + 1) L + 1]

Labels are shifted already, so each token but a document's first is predicted exactly once: where the input
ends a document the label is ``IGNORED``, and so is the padding of the last block. No token is dropped.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from granite_scu.data.documents import Document
from granite_scu.errors import UserError

IGNORED = -100
"""The label of a position that predicts nothing, as torch's cross-entropy has it."""

CHUNK = 1_000_000
"""Characters tokenised at a time: tokenizers take some 200 bytes of memory for each."""
LONG = 5_000_000
"""Characters from which tokenising takes long enough to show its progress."""

# A newline between a visible character and a letter. Tokenizers of Granite's kind never join what stands on
# its two sides, so that a long text cut here gives the tokens it gives as a whole.
_CUT = re.compile(r"(?<=\S)\n(?=[^\W\d_])")


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents as one row of T tokens.

    Attributes:
        tokens: (T,) int32 token ids; the last one ends a document.
        ends: (documents,) int64 positions of the tokens that end a document, rising.
        predicted_bytes: (T,) int32 UTF-8 bytes of the text that each position predicts, 0 at ``ends``. Of a
            character spread over tokens, the first token has all bytes.
    """

    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]
    predicted_bytes: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a stream, a map-style data set for torch's DataLoader.

    Attributes:
        stream: the tokens, shared between the parts of a stream.
        block_size: L, tokens in a block.
        padding: token id that fills up the stream's last block.
        numbers: which blocks of the stream these are, evenly spaced.
    """

    stream: Stream
    block_size: int
    padding: int
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Inputs and labels of one block, (block_size,) each. Raises IndexError beyond the last."""
        start = self.numbers[index] * self.block_size
        window = self.stream.tokens[start : start + self.block_size + 1]
        inputs = np.full(self.block_size, self.padding, np.int32)
        labels = np.full(self.block_size, IGNORED, np.int32)
        inputs[: len(window)] = window[: self.block_size]
        labels[: len(window) - 1] = window[1:]
        labels[self._ends(start, start + self.block_size) - start] = IGNORED
        return inputs, labels

    def documents(self, index: int) -> NDArray[np.int64]:
        """The stream's document, by number, that each position of a block predicts from, (block_size,).

        Meaningless where the label is ``IGNORED``: a supervised position and its label lie in the same document.
        """
        start = self.numbers[index] * self.block_size
        return np.searchsorted(self.stream.ends, np.arange(start, start + self.block_size))

    def part(self, numbers: range) -> "Blocks":
        """The blocks numbered so among these; the stream is shared, not copied."""
        return replace(self, numbers=self.numbers[numbers.start : numbers.stop : numbers.step])

    def checksum(self) -> str:
        """Of the tokens and of how they are cut, a few hexadecimal digits: equal blocks in the same order."""
        digest = hashlib.sha256(repr((self.block_size, self.padding, self.numbers)).encode())
        for array in (self.stream.tokens, self.stream.ends):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()[:16]

    @property
    def n_blocks(self) -> int:
        return len(self)

    @property
    def n_inputs(self) -> int:
        """Tokens that are inputs; padding is not counted."""
        return sum(stop - start for start, stop in self._spans())

    @property
    def n_supervised(self) -> int:
        """Tokens that are predicted: labels other than ``IGNORED``."""
        return self.n_inputs - sum(len(self._ends(*span)) for span in self._spans())

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text that the supervised tokens stand for."""
        predicted = self.stream.predicted_bytes
        return sum(int(predicted[start:stop].sum(dtype=np.int64)) for start, stop in self._spans())

    @property
    def n_documents(self) -> int:
        """Documents that have a token among the inputs."""
        found: set[int] = set()
        for start, stop in self._spans():
            if stop > start:
                first, last = np.searchsorted(self.stream.ends, (start, stop - 1))
                found.update(range(int(first), int(last) + 1))
        return len(found)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """First position in the stream and the one after the last, of each run of consecutive blocks."""
        numbers, length = self.numbers, len(self.stream.tokens)
        runs = [numbers] if numbers.step == 1 else [range(number, number + 1) for number in numbers]
        for run in runs:
            start = run.start * self.block_size
            yield start, max(start, min(run.stop * self.block_size, length))

    def _ends(self, start: int, stop: int) -> NDArray[np.int64]:
        first, last = np.searchsorted(self.stream.ends, (start, stop))
        return self.stream.ends[first:last]


def pack(
    documents: list[Document], tokenizer: PreTrainedTokenizerBase, block_size: int, show_progress: bool = True
) -> Blocks:
    """All blocks of the documents, in their order.

    Args:
        documents: at least one.
        tokenizer: its end-of-text token ends each document; pads with that too where it has no padding token.
        block_size: tokens in a block.
        show_progress: show a bar on stderr when the text is long.

    Raises:
        UserError: the tokenizer has no end-of-text token.
    """
    stream = encode(documents, tokenizer, show_progress)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    n_blocks = -(-(len(stream.tokens) - 1) // block_size)  # the last token predicts nothing: no block for it alone
    return Blocks(stream, block_size, padding, range(n_blocks))


def encode(documents: list[Document], tokenizer: PreTrainedTokenizerBase, show_progress: bool = True) -> Stream:
    """The documents' tokens, each document ended by the end-of-text token. As ``pack``."""
    assert documents
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError("--model: its tokenizer has no end-of-text token (eos_token) to end documents with")
    tokens: list[NDArray[np.int32]] = []
    widths: list[NDArray[np.int32]] = []  # bytes of text that each token stands for
    ends: list[int] = []
    length, n_characters = 0, sum(len(document.text) for document in documents)
    bar = Progress(console=Console(stderr=True), transient=True, disable=not show_progress or n_characters < LONG)
    with bar as progress:
        task = progress.add_task("tokenising", total=n_characters)
        for chunk in _chunks(_pieces(documents)):
            texts = [text for text, _ in chunk]
            many = tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
            )
            for (text, is_last), ids, offsets in zip(chunk, many["input_ids"], many["offset_mapping"], strict=True):
                tokens.append(np.array([*ids, eos] if is_last else ids, np.int32))
                widths.append(np.append(_widths(text, offsets), np.zeros(int(is_last), np.int32)))
                length += len(tokens[-1])
                if is_last:
                    ends.append(length - 1)
            progress.advance(task, sum(map(len, texts)))
    predicted_bytes = np.append(np.concatenate(widths)[1:], np.int32(0))
    predicted_bytes[ends] = 0
    return Stream(np.concatenate(tokens), np.array(ends, np.int64), predicted_bytes)


def _pieces(documents: Iterable[Document]) -> Iterator[tuple[str, bool]]:
    """(text, whether it ends its document): long documents in pieces of a little more than ``CHUNK`` characters."""
    for document in documents:
        start = 0
        while cut := _CUT.search(document.text, start + CHUNK):
            yield document.text[start : cut.end()], False
            start = cut.end()
        yield document.text[start:], True


def _chunks(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """The pieces in groups of about ``CHUNK`` characters."""
    chunk: list[tuple[str, bool]] = []
    length = 0
    for text, is_last in pieces:
        chunk.append((text, is_last))
        length += len(text)
        if length >= CHUNK:
            yield chunk
            chunk, length = [], 0
    if chunk:
        yield chunk


def _widths(text: str, offsets: list[tuple[int, int]]) -> NDArray[np.int32]:
    """UTF-8 bytes from the end of the token before to the end of each; they add up to the text's."""
    ends = np.fromiter((end for _, end in offsets), np.int64, len(offsets))
    ends[-1:] = len(text)  # the last token has what the tokenizer leaves out at the end
    if not text.isascii():
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        bytes_each = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
        ends = np.append(0, bytes_each.cumsum())[ends]
    return np.diff(ends, prepend=0).astype(np.int32)
