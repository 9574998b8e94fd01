"""From documents to one stream of tokens, about a megabyte of text at a time.

The tokens of all documents, each ended by the end-of-text token, form one row. Tokenizers of Granite's kind work on
bytes, so that a token's bytes are known from its id alone; plain texts then take the library's fastest way, on all
cores and without offsets, while the next ones are read.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from granite_scu.data.chat import Renderer
from granite_scu.data.documents import Conversation, Document, TextFile
from granite_scu.data.splits import SPLIT_SEED, Fingerprint
from granite_scu.errors import UserError

CHUNK = 1_000_000
"""Characters tokenised at a time: tokenizers take some 200 bytes of memory for each."""
LONG = 5_000_000
"""Characters from which tokenising takes long enough to show its progress."""

# A newline between a visible character and a letter or digit, and the end of a word. Tokenizers of Granite's kind never
# join what stands on its two sides, so that a long text cut here gives the tokens it gives as a whole.
_LINE_END = r"(?<=\S)\n(?=[^\W_])"
_WORD_END = r"(?<=[^\W\d_])(?=[ ,.;:!?\u3001\u3002\uff0c\uff1b\uff1a\uff01\uff1f])"
_CUT = re.compile(_LINE_END)
_CUT_LATE = re.compile(f"{_LINE_END}|{_WORD_END}")


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents as one row of T tokens.

    Attributes:
        tokens: (T,) int32 token ids; the last one ends a document.
        ends: (documents,) int64 positions of the tokens that end a document, rising.
        widths: (T,) uint16 UTF-8 bytes of the text that each token stands for.
        targets: (T,) bool, whether a token is supervised; a document's first never is, for nothing predicts it.
    """

    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]
    widths: NDArray[np.uint16]
    targets: NDArray[np.bool_]

    @property
    def bounds(self) -> NDArray[np.int64]:
        """(documents, 2) where each begins, and the position after its end of text."""
        return np.stack([np.append(0, self.ends + 1)[:-1], self.ends + 1], 1)


@dataclass(frozen=True)
class Part:
    """Some consecutive tokens of a stream, and the documents that end in them.

    Attributes:
        tokens: as in ``Stream``, and so the next two.
        ends: positions in this part.
        documents: those that end here.
        n_pieces: texts that were tokenised for this part.
        n_conversations: documents that end here and came as messages.
        n_empty: documents passed over because nothing stands in them.
        first_empty: name of the first of them.
        characters: read for this part.
    """

    tokens: NDArray[np.int32]
    widths: NDArray[np.uint16]
    targets: NDArray[np.bool_]
    ends: NDArray[np.int64]
    documents: list["Piece"]
    n_pieces: int
    n_conversations: int
    n_empty: int
    first_empty: str
    characters: int


@dataclass(frozen=True)
class Piece:
    """A text that is tokenised at once: a document or some of it.

    Attributes:
        text: what is tokenised.
        name: of the document.
        fingerprint: of the document, up to this piece.
        source: number of what the document came from.
        is_first: whether the document begins with it.
        is_last: whether the document ends with it.
        is_conversation: whether a chat template has rendered it.
        spans: characters that are supervised, [start, stop) each; None supervises all, and the end of text.
        is_ended: whether the end of text follows its last piece.
    """

    text: str
    name: str
    fingerprint: Fingerprint
    source: int = 0
    is_first: bool = True
    is_last: bool = True
    is_conversation: bool = False
    spans: tuple[tuple[int, int], ...] | None = None
    is_ended: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether nothing stands in the document."""
        return self.is_first and self.is_last and not self.text.strip()


def encode(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    show_progress: bool = True,
    loss_on: str = "completion",
) -> Stream:
    """The documents' tokens, each document ended by the end-of-text token, in memory.

    Args:
        documents: at least one, none of them empty.
        tokenizer: its end-of-text token ends each document.
        show_progress: show a bar on stderr when the text is long.
        loss_on: of conversations, see ``chat.Renderer``.

    Raises:
        UserError: the tokenizer has no end-of-text token or is not of the tokenizers library, or what rendering raises.
    """
    assert documents
    n_characters = sum(len(document.text) for document in documents)
    bar = Progress(console=Console(stderr=True), transient=True, disable=not show_progress or n_characters < LONG)
    parts: list[Part] = []
    with bar as progress:
        task = progress.add_task("tokenising", total=n_characters)
        for part in encoded([documents], Renderer(tokenizer, loss_on)):
            parts.append(part)
            progress.advance(task, part.characters)
    return joined(parts)


def joined(parts: Sequence[Part]) -> Stream:
    """The stream that consecutive parts make; the last of them ends with a document."""
    begins = np.cumsum([0, *(len(part.tokens) for part in parts)])
    return Stream(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.ends + begin for part, begin in zip(parts, begins, strict=False)]),
        np.concatenate([part.widths for part in parts]),
        np.concatenate([part.targets for part in parts]),
    )


def encoded(
    sources: Sequence[Iterable[Document | TextFile]], renderer: Renderer, split_seed: int = SPLIT_SEED, skip: int = 0
) -> Iterator[Part]:
    """The stream of all documents, part by part; joined, the parts are the stream.

    Args:
        sources: documents, read as they are needed.
        renderer: of conversations, and its tokenizer for all texts.
        split_seed: of the order that fingerprints have.
        skip: pieces at the beginning that are read and not tokenised again.

    Raises:
        UserError: as ``encode``, and what reading raises.
    """
    pieces = (
        piece
        for number, documents in enumerate(sources)
        for document in documents
        for piece in pieces_of(document, number, renderer, split_seed)
    )
    yield from parts_of(islice(pieces, skip, None), renderer.tokenizer)


def parts_of(pieces: Iterable["Piece"], tokenizer: PreTrainedTokenizerBase) -> Iterator[Part]:
    """The tokens of the pieces, about a megabyte of text at a time. Raises UserError as ``encode``."""
    encoder = _Encoder(tokenizer)
    with ThreadPoolExecutor(1) as pool:  # the next chunk is read and tokenised while this one is taken up
        pending: tuple[list[Piece], Future[list[Any]]] | None = None
        for chunk in _chunks(pieces):
            started = chunk, pool.submit(encoder.tokenised, chunk)
            if pending:
                yield encoder.part(pending[0], pending[1].result())
            pending = started
        if pending:
            yield encoder.part(pending[0], pending[1].result())


class _Encoder:
    """Turns pieces into parts of a stream."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("--model: its tokenizer has no end-of-text token (eos_token) to end documents with")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError("--model: its tokenizer is not of the tokenizers library; convert it with transformers")
        self.backend = backend
        self.backend.no_truncation()
        self.backend.no_padding()
        self.end: int = tokenizer.eos_token_id
        self.widths = _bytes_by_token(backend)
        self.special = np.array(tokenizer.all_special_ids, np.int32)

    def tokenised(self, chunk: list[Piece]) -> list[Any]:
        """Encodings of the pieces, with offsets only where they are needed."""
        by_offset = self.widths is None or any(piece.spans is not None for piece in chunk)
        encode = self.backend.encode_batch if by_offset else self.backend.encode_batch_fast
        return encode([piece.text for piece in chunk], add_special_tokens=False)

    def part(self, chunk: list[Piece], encodings: list[Any]) -> Part:
        """The stream's part that is made of a chunk of pieces."""
        empty = [piece.name for piece in chunk if piece.is_empty]
        kept = [
            (piece, self._row(piece, row)) for piece, row in zip(chunk, encodings, strict=True) if not piece.is_empty
        ]
        tokens, widths, targets = (
            np.concatenate([np.zeros(0, kind), *(row[i] for _, row in kept)])
            for i, kind in enumerate((np.int32, np.uint16, np.bool_))
        )
        lengths = np.cumsum([len(row[0]) for _, row in kept], dtype=np.int64)
        last = [piece.is_last for piece, _ in kept]
        return Part(
            tokens,
            widths,
            targets,
            lengths[last] - 1,
            [piece for piece, _ in kept if piece.is_last],
            len(chunk),
            sum(piece.is_conversation for piece, _ in kept),
            len(empty),
            empty[0] if empty else "",
            sum(len(piece.text) for piece in chunk),
        )

    def _row(self, piece: Piece, encoding: Any) -> tuple[NDArray[np.int32], NDArray[np.uint16], NDArray[np.bool_]]:
        """Tokens, widths and targets of a piece, with the end of text where the document ends."""
        tokens, widths = self._measured(piece.text, encoding)
        targets = np.ones(len(tokens), bool) if piece.spans is None else supervised(encoding.offsets, piece.spans)
        if piece.is_last and piece.is_ended and not (piece.is_conversation and tokens[-1:] == self.end):
            learned = piece.spans is None or (len(piece.spans) > 0 and piece.spans[-1][1] == len(piece.text))
            tokens, widths = np.append(tokens, np.int32(self.end)), np.append(widths, np.uint16(0))
            targets = np.append(targets, learned)
        if piece.is_conversation:  # its marks are no text
            widths = np.where(np.isin(tokens, self.special), np.uint16(0), widths)
        if piece.is_first:
            targets[0] = False
        return tokens, widths, targets

    def _measured(self, text: str, encoding: Any) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
        """Token ids, and the UTF-8 bytes of the text that each stands for, which add up to the text's."""
        ids = np.array(encoding.ids, np.int32)
        size = len(text) if text.isascii() else len(text.encode())
        if self.widths is not None:
            widths = self.widths[ids]
            if widths.sum(dtype=np.int64) == size:
                return ids, widths
            encoding = self.backend.encode(text, add_special_tokens=False)  # something was left out or rewritten
        return ids, bytes_by_offset(text, encoding.offsets)


def supervised(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens have a character of the spans, (tokens,)."""
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    found = np.zeros(len(starts), bool)
    for start, stop in spans:
        found |= (starts < stop) & (stops > start)
    return found


def _bytes_by_token(backend: Any) -> NDArray[np.uint16] | None:
    """UTF-8 bytes of each token id; None where tokens are not made of bytes."""
    if type(backend.decoder).__name__ != "ByteLevel":
        return None
    vocabulary, added_tokens = backend.get_vocab(with_added_tokens=False), backend.get_added_tokens_decoder()
    widths = np.zeros(1 + max([*vocabulary.values(), *added_tokens]), np.uint16)
    for token, number in vocabulary.items():
        widths[number] = len(token)  # a letter of the byte-level alphabet for each byte
    for number, added in added_tokens.items():
        widths[number] = len(added.content.encode())
    return widths


def bytes_by_offset(text: str, offsets: Sequence[tuple[int, int]]) -> NDArray[np.uint16]:
    """UTF-8 bytes from the end of the token before to the end of each; they add up to the text's.

    Of a character spread over tokens, the first token has all bytes.
    """
    ends = np.fromiter((end for _, end in offsets), np.int64, len(offsets))
    ends[-1:] = len(text)  # the last token has what the tokenizer leaves out at the end
    if not text.isascii():
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        bytes_each = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
        ends = np.append(0, bytes_each.cumsum())[ends]
    return np.diff(ends, prepend=0).astype(np.uint16)


def pieces_of(document: Document | TextFile, source: int, renderer: Renderer, split_seed: int) -> Iterator[Piece]:
    """The document's text: where it is long, in pieces of ``CHUNK`` to about twice as many characters."""
    fingerprint = Fingerprint(split_seed)
    if isinstance(document, Conversation):
        fingerprint.update(document.text)
        text, spans = renderer.render(document) if document.text else ("", None)
        yield Piece(text, document.name, fingerprint, source, is_conversation=True, spans=spans)
        return
    text, searched, is_first = "", CHUNK, True
    for more in document.pieces():
        fingerprint.update(more)
        text += more
        while cut := _cut(text, searched):
            yield Piece(text[:cut], document.name, fingerprint, source, is_first, is_last=False)
            text, searched, is_first = text[cut:], CHUNK, False
        searched = max(CHUNK, len(text) - 2)
    yield Piece(text, document.name, fingerprint, source, is_first)


def _cut(text: str, searched: int) -> int | None:
    """Where a long text is cut: behind a line, or where the lines are long behind a word.

    Args:
        text: from the last cut on, as far as it is read.
        searched: characters in which there is no place to cut.
    """
    latest = 2 * CHUNK
    found = _CUT.search(text, searched, latest)
    if found is None and len(text) >= latest:
        found = _CUT_LATE.search(text, searched if searched > latest else CHUNK)
    return found.end() if found else None


def _chunks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces in groups of about ``CHUNK`` characters."""
    chunk: list[Piece] = []
    length = 0
    for piece in pieces:
        chunk.append(piece)
        length += len(piece.text)
        if length >= CHUNK:
            yield chunk
            chunk, length = [], 0
    if chunk:
        yield chunk
