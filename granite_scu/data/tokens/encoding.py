"""From documents to one stream of tokens, some hundred kilobytes of text at a time.

The tokens of all documents, each ended by the end-of-text token, form one row. Tokenizers of Granite's kind work on
bytes, so that a token's bytes are known from its id alone; plain texts then take the library's fastest way, on all
cores and without offsets, while the next ones are read.
"""

import logging
import re
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.progress import Heartbeat
from granite_scu.config.settings import DataConfig
from granite_scu.data.sources.documents import Conversation, Document, Fingerprint, TextFile
from granite_scu.data.tokens.chat import Rendered, Renderer
from granite_scu.data.tokens.control_tokens import ControlTokens, Places, ReadAs
from granite_scu.data.tokens.stored import StoredArray, in_pieces

_log = logging.getLogger(__name__)

CHUNK = 50_000
"""Characters from which a long text is cut, so that every core has some of it: the library takes one for each text."""
LONG_CHUNK = 1_000_000
"""As ``CHUNK``, for tokenizers with which a cut may change a token: seldom enough, and the memory is bounded."""
GROUP = 500_000
"""Characters given to the library at a time; they take many times their size in memory until they are one array."""
LIMIT = 1_000_000
"""Characters after which a text is cut wherever that is: what is tokenised at once takes a hundred times its size."""
LONGEST_CHAT = 2_000_000
"""Characters of a conversation, which is always tokenised at once."""
AT_ONCE = 2
"""Groups that are tokenised at the same time: with one, the library's own threads would be idle whenever it waits for
the interpreter. Another is read meanwhile."""
LONG = 5_000_000
"""Bytes from which tokenising takes long enough to show its progress."""

# A newline between a visible character and a letter or digit, and the end of a word. Tokenizers of Granite's kind never
# join what stands on its two sides, so that a long text cut here gives the tokens it gives as a whole.
_LINE_END = r"(?<=\S)\n(?=[^\W_])"
_WORD_END = r"(?<=[^\W\d_])(?=[ ,.;:!?\u3001\u3002\uff0c\uff1b\uff1a\uff01\uff1f])"
_CUT = re.compile(_LINE_END)
_CUT_LATE = re.compile(f"{_LINE_END}|{_WORD_END}")
_CUT_LAST = re.compile(r"(?<=[^\W\d_])(?=\d)")
"""Between a letter and a digit, which such tokenizers never join either: where base64 and its like can be cut."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents as one row of T tokens.

    Attributes:
        tokens: (T,) int32 token ids; the last one ends a document. In a file or in memory, as the next two.
        ends: (documents,) int64 positions of the tokens that end a document, rising; in memory.
        widths: (T,) uint16 UTF-8 bytes of the text that each token stands for.
        targets: (T,) bool, whether a token is supervised; a document's first never is, for nothing predicts it.
    """

    tokens: NDArray[np.int32] | StoredArray
    ends: NDArray[np.int64]
    widths: NDArray[np.uint16] | StoredArray
    targets: NDArray[np.bool_] | StoredArray

    @property
    def bounds(self) -> NDArray[np.int64]:
        """(documents, 2) where each begins, and the position after its end of text."""
        return self.bounds_of(np.arange(len(self.ends)))

    def bounds_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """As ``bounds``, of some documents by number."""
        begins = np.where(documents > 0, self.ends[documents - 1] + 1, 0)
        return np.stack([begins, self.ends[documents] + 1], 1)

    def part(self, documents: NDArray[np.int64]) -> "Stream":
        """Some documents, by number, as a stream of their own in memory."""
        bounds = self.bounds_of(documents)
        ends = (bounds[:, 1] - bounds[:, 0]).cumsum() - 1
        tokens, widths, targets = (
            np.concatenate([array[:0], *(array[start:stop] for start, stop in bounds.tolist())])
            for array in (self.tokens, self.widths, self.targets)
        )
        return Stream(tokens, ends, widths, targets)


@dataclass(frozen=True)
class Part:
    """Some consecutive tokens of a stream, and the documents that end in them.

    Attributes:
        tokens: as in ``Stream``, and so the next two.
        ends: positions in this part.
        documents: those that end here.
        n_pieces: texts that were tokenised for this part.
        empty: names of documents passed over because nothing stands in them.
        n_control: control tokens that somebody wrote.
        first_control: the first of them and where it stands; empty where there is none.
        n_thoughts: answers of which the chat template leaves out what was thought.
        n_system: conversations with a system turn of their own.
    """

    tokens: NDArray[np.int32]
    widths: NDArray[np.uint16]
    targets: NDArray[np.bool_]
    ends: NDArray[np.int64]
    documents: list["Piece"]
    n_pieces: int
    empty: list[str]
    n_control: int = 0
    first_control: str = ""
    n_thoughts: int = 0
    n_system: int = 0


class Piece(NamedTuple):
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
        is_begun: whether the document begins as the tokenizer begins a text.
        is_ended: whether the end of text follows its last piece.
        written: control tokens in it that are read as text.
        n_control: control tokens that somebody wrote, however they are read.
        first_control: the first of them; empty where there is none.
        n_thoughts: as of ``Rendered``.
        has_system: as of ``Rendered``.
    """

    text: str
    name: str
    fingerprint: Fingerprint
    source: int = 0
    is_first: bool = True
    is_last: bool = True
    is_conversation: bool = False
    spans: tuple[tuple[int, int], ...] | None = None
    is_begun: bool = True
    is_ended: bool = True
    written: Places = ()
    n_control: int = 0
    first_control: str = ""
    n_thoughts: int = 0
    has_system: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing stands in the document."""
        return self.is_first and self.is_last and not self.text.strip()


def encode(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    show_progress: bool = True,
    loss_on: str = "completion",
    control_tokens: ReadAs = "text",
) -> Stream:
    """The documents' tokens, each document ended by the end-of-text token, in memory.

    Args:
        documents: at least one, none of them empty.
        tokenizer: its end-of-text token ends each document.
        show_progress: show a bar on stderr when the text is long.
        loss_on: of conversations, see ``chat.Renderer``.
        control_tokens: what becomes of those that somebody wrote.

    Raises:
        UserError: the tokenizer has no end-of-text token or is not of the tokenizers library, or what rendering raises.
    """
    assert documents
    size = sum(len(document.text.encode()) for document in documents)
    renderer = Renderer(tokenizer, loss_on, control_tokens)
    return joined(list(with_bar(encoded([documents], renderer), size if show_progress else 0)))


def with_bar(parts: Iterator[Part], size: int) -> Iterator[Part]:
    """The parts as they come, with a bar on stderr where their text has many bytes; a line each minute in its place
    where stderr is no terminal."""
    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console, heartbeat, done = Console(stderr=True), Heartbeat(size), 0
    hidden = size < LONG or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("tokenising", total=size)
        for part in parts:
            yield part
            done += int(part.widths.sum(dtype=int))
            progress.update(task, completed=done)
            if hidden and size and heartbeat.is_due():
                heartbeat.beat()
                _log.info("tokenising: %.0f of %.0f MB  %s", done / 1e6, size / 1e6, heartbeat.left(done))


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
    sources: Sequence[Iterable[Document | TextFile]],
    renderer: Renderer,
    split_seed: int = DataConfig.split_seed,
    skip: int = 0,
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
    least = CHUNK if _may_be_cut(renderer.tokenizer) else LONG_CHUNK
    pieces = (
        piece
        for number, documents in enumerate(sources)
        for document in documents
        for piece in pieces_of(document, number, renderer, split_seed, least)
    )
    yield from parts_of(groups_of(islice(pieces, skip, None), GROUP), renderer)


def _may_be_cut(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text in two gives the tokens of the whole; not where, for one, a space is put before each text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    return all(
        backend.encode(first + second, add_special_tokens=False).ids
        == [token for text in (first, second) for token in backend.encode(text, add_special_tokens=False).ids]
        for first, second in (("a.\n", "b"), ("a", " b"), ("a", "1"))
    )


def parts_of(groups: Iterable[list["Piece"]], renderer: Renderer, at_once: int = AT_ONCE) -> Iterator[Part]:
    """The tokens of each group of pieces.

    Args:
        groups: read as they are needed; one is read while others are tokenised.
        renderer: as of ``encoded``.
        at_once: groups that are tokenised at the same time.

    Raises:
        UserError: as ``encode``.
    """
    encoder = _Encoder(renderer.tokenizer, renderer.control)
    pool = ThreadPoolExecutor(at_once)
    pending: deque[Future[Part]] = deque()
    try:
        for group in groups:
            pending.append(pool.submit(encoder.part, group))
            if len(pending) > at_once:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an error nobody waits for what is left


def require_known(
    tokens: StoredArray | NDArray[Any], tokenizer: PreTrainedTokenizerBase, rows: int | None, model: str
) -> None:
    """Refuse tokens that a model has no embedding for.

    Args:
        tokens: their ids.
        tokenizer: that made them.
        rows: of the model's embedding; None where nobody knows.
        model: its name.

    Raises:
        UserError: names the token.
    """
    if rows is None or max(tokenizer.get_vocab().values(), default=0) < rows:
        return
    for piece in in_pieces(tokens):
        if len(piece) and (largest := int(piece.max())) >= rows:
            raise UserError(
                f"--model {model}: its tokenizer makes the token {tokenizer.convert_ids_to_tokens(largest)} of the "
                f"text, with the id {largest}, and the model has {rows:,} tokens, so that the two do not belong "
                "together; take the tokenizer that came with the model, or give the model rows for it: "
                "resize_token_embeddings(len(tokenizer)) in transformers, then save_pretrained"
            )


def backend_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizers library's part of a tokenizer, set to leave texts as long as they are.

    Raises:
        UserError: it has none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError("--model: its tokenizer is not of the tokenizers library; convert it with transformers")
    backend.no_truncation()
    backend.no_padding()
    return backend


def token_ids(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a question in a chat, without an end of text.

    Raises:
        UserError: the chat template has made too much of it, or what ``encode`` raises.
    """
    if len(rendered.text) > LONGEST_CHAT:
        raise UserError(
            f"--chat: the chat template makes {len(rendered.text):,} characters of the question, more than the "
            f"{LONGEST_CHAT:,} that are tokenised at once; shorten it, or choose another template"
        )
    piece = Piece(rendered.text, "--chat", Fingerprint(0), is_conversation=True, written=rendered.written)
    (encoding,) = _Encoder(tokenizer, ControlTokens(tokenizer)).tokenised([piece])
    return encoding.ids


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids that a tokenizer puts before every text: none, or its beginning of text.

    Documents begin with them, and so does what is generated from: a model was trained on texts that do.
    """
    text = "a"
    bare, whole = tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer(text)["input_ids"]
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])


@dataclass(frozen=True)
class _Spliced:
    """An encoding that is made of several."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.ids)


class _Encoder:
    """Turns pieces into parts of a stream."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "--model: its tokenizer has no end-of-text token; name it as eos_token in tokenizer_config.json"
            )
        self.backend = backend_of(tokenizer)
        self.beginning = beginning(tokenizer)
        self.end: int = tokenizer.eos_token_id
        self.by_token = _bytes_by_token(self.backend)
        self.special = np.array(tokenizer.all_special_ids, np.int32)
        self.control = control

    @cached_property
    def without_control_tokens(self) -> Any:
        """The same tokenizer, to which a control token is a text like any other."""
        found = Tokenizer.from_str(self.backend.to_str())
        found.encode_special_tokens = True
        return found

    def tokenised(self, group: list[Piece]) -> list[Any]:
        """Encodings of the pieces, with offsets only where they are needed."""
        by_offset = self.by_token is None or any(piece.spans is not None for piece in group)
        encode = self.backend.encode_batch if by_offset else self.backend.encode_batch_fast
        usual = iter(encode([piece.text for piece in group if not piece.written], add_special_tokens=False))
        return [self._with_text(piece) if piece.written else next(usual) for piece in group]

    def _with_text(self, piece: Piece) -> Any:
        """The encoding of a piece with control tokens that are read as text; those of a chat template stay tokens."""
        if not piece.is_conversation:
            return self._as_text(piece.text, piece.name)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        bounds = [0, *(bound for place in piece.written for bound in place), len(piece.text)]
        for number, (start, stop) in enumerate(pairwise(bounds)):
            text = piece.text[start:stop]
            found = self._as_text(text, piece.name) if number % 2 else self._encoded(text)
            ids += found.ids
            offsets += [(begin + start, end + start) for begin, end in found.offsets]
        return _Spliced(ids, offsets)

    def _encoded(self, text: str) -> Any:
        return self.backend.encode(text, add_special_tokens=False)

    def _as_text(self, text: str, name: str) -> Any:
        found = self.without_control_tokens.encode(text, add_special_tokens=False)
        if token := self.control.made_by(found.tokens):
            raise UserError(
                f"--control-tokens text: the tokenizer of --model makes the control token {token} of the text of "
                f"{name}; take it out, or choose tokens"
            )
        return found

    def _looked_through(self, piece: Piece) -> Piece:
        """A piece of plain text with the control tokens in it; those of a conversation are known."""
        if piece.is_conversation or not (found := self.control.places(piece.text, piece.name)):
            return piece
        written = () if self.control.read_as == "tokens" else found
        return piece._replace(written=written, n_control=len(found), first_control=piece.text[slice(*found[0])])

    def part(self, group: list[Piece]) -> Part:
        """The stream's part that is made of a group of pieces."""
        group = [self._looked_through(piece) for piece in group]
        with_encodings = zip(group, self.tokenised(group), strict=True)
        rows = self._rows((piece, encoding) for piece, encoding in with_encodings if not piece.is_empty)
        # Packed a row at a time, since ids are an object each until then; by struct, which is faster at it than numpy.
        tokens = np.frombuffer(b"".join(self._packed(row) for row in rows), np.int32)
        return Part(
            tokens,
            self._widths(tokens, rows),
            _targets(len(tokens), rows),
            np.array([row.stop - 1 for row in rows if row.piece.is_last], np.int64),
            [row.piece for row in rows if row.piece.is_last],
            len(group),
            [piece.name for piece in group if piece.is_empty],
            sum(piece.n_control for piece in group),
            next((f"{piece.first_control} in {piece.name}" for piece in group if piece.n_control), ""),
            sum(piece.n_thoughts for piece in group),
            sum(piece.has_system for piece in group),
        )

    def _packed(self, row: "_Row") -> bytes:
        ids = row.encoding.ids
        if row.begin > row.start or row.is_ended:
            ids = [*self.beginning[: row.begin - row.start], *ids, *([self.end] if row.is_ended else [])]
        return struct.pack(f"={len(ids)}i", *ids)

    def _rows(self, with_encodings: Iterable[tuple[Piece, Any]]) -> list["_Row"]:
        """Where each piece's tokens go, one after the other."""
        rows: list[_Row] = []
        start = 0
        for piece, encoding in with_encodings:
            # A template may have set the end of text already.
            is_ended = (
                piece.is_last and piece.is_ended and not (piece.is_conversation and encoding.ids[-1:] == [self.end])
            )
            n_before = len(self.beginning) if piece.is_first and piece.is_begun else 0
            rows.append(_Row(piece, encoding, start, start + n_before, start + n_before + len(encoding), is_ended))
            start = rows[-1].stop
        return rows

    def _widths(self, tokens: NDArray[np.int32], rows: list["_Row"]) -> NDArray[np.uint16]:
        """UTF-8 bytes of the text that each token stands for; those of a piece add up to its text's."""
        widths = np.zeros(len(tokens), np.uint16) if self.by_token is None else self.by_token.take(tokens)
        for row in rows:
            widths[row.start : row.begin] = widths[row.end : row.stop] = 0
        with_tokens = [row for row in rows if row.start < row.stop]
        n_bytes = np.add.reduceat(widths, [row.start for row in with_tokens], dtype=int) if with_tokens else widths
        for row, found in zip(with_tokens, n_bytes.tolist(), strict=True):
            text = slice(row.begin, row.end)
            if found != row.n_bytes:  # not made of bytes, or something was rewritten
                has_offsets = self.by_token is None or row.piece.written
                encoding = row.encoding if has_offsets else self._encoded(row.piece.text)
                widths[text] = bytes_by_offset(row.piece.text, encoding.offsets)
            if row.piece.is_conversation:  # its marks are no text
                widths[text][np.isin(tokens[text], self.special)] = 0
        return widths


class _Row(NamedTuple):
    """A piece's tokens in a part: from ``begin`` to ``end``; from ``start`` on those that begin a text, where they are
    put before them, and one more where the end of text is put behind them."""

    piece: Piece
    encoding: Any
    start: int
    begin: int
    end: int
    is_ended: bool

    @property
    def stop(self) -> int:
        return self.end + self.is_ended

    @property
    def n_bytes(self) -> int:
        """Of the text, in UTF-8."""
        text = self.piece.text
        return len(text) if text.isascii() else len(text.encode())


def _targets(n_tokens: int, rows: list[_Row]) -> NDArray[np.bool_]:
    """Which tokens are supervised; a document's first never is."""
    targets = np.ones(n_tokens, bool)
    for row in rows:
        spans = row.piece.spans
        if spans is not None:
            targets[row.begin : row.end] = supervised(row.encoding.offsets, spans)
            targets[row.end : row.stop] = bool(spans) and spans[-1][1] == len(row.piece.text)
        if row.piece.is_first:  # nothing predicts the first, and of those before it the text says nothing
            targets[row.start : max(row.begin, row.start + 1)] = False
    return targets


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


def pieces_of(
    document: Document | TextFile, source: int, renderer: Renderer, split_seed: int, least: int
) -> Iterator[Piece]:
    """The document's text: where it is long, in pieces of ``least`` to about twice as many characters; a
    conversation always as a whole.

    Raises:
        UserError: a conversation that is too long for that, or what reading and rendering raise.
    """
    fingerprint = Fingerprint(split_seed)
    if isinstance(document, Conversation):
        fingerprint.update(document.text)
        found = renderer.render(document) if document.text else Rendered("", None)
        if len(found.text) > LONGEST_CHAT:
            raise UserError(
                f"--data-dir {document.name}: a conversation of {len(found.text):,} characters, which is tokenised as "
                f"a whole; divide it into several of at most {LONGEST_CHAT:,}"
            )
        yield Piece(name=document.name, fingerprint=fingerprint, source=source, is_conversation=True, **found._asdict())
        return
    text, begin, searched, is_first = "", 0, least, True
    for more in document.pieces():
        fingerprint.update(more)
        text, begin = text[begin:] + more, 0
        while cut := _cut(text, begin, searched, least) or _forced_cut(text, begin, least, document.name):
            yield Piece(text[begin:cut], document.name, fingerprint, source, is_first, is_last=False)
            begin, searched, is_first = cut, least, False
        searched = max(least, len(text) - begin - 2)
    yield Piece(text[begin:], document.name, fingerprint, source, is_first)


def _cut(text: str, begin: int, searched: int, least: int) -> int | None:
    """Where a long text is cut next: behind a line, or where the lines are long behind a word.

    Args:
        text: as far as it is read.
        begin: of what is not cut yet.
        searched: characters from there on in which there is no place to cut.
        least: characters of a piece.
    """
    latest = 2 * least
    found = _CUT.search(text, begin + searched, begin + latest)
    if found is None and len(text) >= begin + latest:
        late = searched if searched > latest else least
        found = _CUT_LATE.search(text, begin + late, begin + max(latest, LIMIT))
    return found.end() if found else None


def _forced_cut(text: str, begin: int, least: int, name: str) -> int | None:
    """Where a text is cut in which no line and no word ends: for now nowhere, if it is short enough."""
    limit = begin + max(2 * least, LIMIT)
    if len(text) <= limit:
        return None
    if found := _CUT_LAST.search(text, (begin + limit) // 2, limit):
        return found.end()
    _log.warning("%s: no line and no word ends in %d characters; it is cut there, within a token", name, limit - begin)
    return limit


def groups_of(pieces: Iterable[Piece], least: int, whole: bool = False) -> Iterator[list[Piece]]:
    """The pieces in groups of so many characters or some more; ``whole`` lets each group end with a document."""
    group: list[Piece] = []
    length = 0
    for piece in pieces:
        group.append(piece)
        length += len(piece.text)
        if length >= least and (piece.is_last or not whole):
            yield group
            group, length = [], 0
    if group:
        yield group
