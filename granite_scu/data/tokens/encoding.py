"""From documents to one stream of tokens, some hundred kilobytes of text at a time.

The tokens of all documents, each ended by the end-of-text token, form one row. Tokenizers of Granite's kind work on
bytes, so that a token's bytes are known from its id alone; plain texts then take the library's fastest way, on all
cores and without offsets, while the next ones are read.
"""

import struct
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.progress import advancing
from granite_scu.config.settings import DataConfig
from granite_scu.data.sources.documents import Document, TextFile
from granite_scu.data.sources.read import named_by
from granite_scu.data.tokens.chat import Renderer
from granite_scu.data.tokens.pieces import LONGEST_CHAT, Piece, groups_of, pieces_of
from granite_scu.data.tokens.special_tokens import Places, ReadAs, SpecialTokens
from granite_scu.data.tokens.stream import ARRAYS, OF_TOKENS, Corpus, StoredArray, in_pieces, joined

CHUNK = 50_000
"""Characters from which a long text is cut, so that every core has some of it: the library takes one for each text."""
LONG_CHUNK = 1_000_000
"""As ``CHUNK``, for tokenizers with which a cut may change a token: seldom enough, and the memory is bounded."""
GROUP = 500_000
"""Characters given to the library at a time; they take many times their size in memory until they are one array."""
AT_ONCE = 2
"""Groups that are tokenised at the same time: with one, the library's own threads would be idle whenever it waits for
the interpreter. Another is read meanwhile."""
LONG = 5_000_000
"""Bytes from which tokenising takes long enough to show its progress."""


def encode(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    loss_on: str = "completion",
    special_tokens: ReadAs = "text",
) -> Corpus:
    """The documents' tokens, each document ended by the end-of-text token, in memory. Of long text a bar is shown.

    Args:
        documents: at least one, none of them empty.
        tokenizer: its end-of-text token ends each document.
        loss_on: of conversations, see ``chat.Renderer``.
        special_tokens: what becomes of those that somebody wrote, ``--control-tokens``.

    Raises:
        UserError: the tokenizer has no end-of-text token or is not of the tokenizers library, or what rendering raises.
    """
    assert documents
    size = sum(len(document.text.encode()) for document in documents)
    renderer = Renderer(tokenizer, loss_on, special_tokens)
    return joined(list(with_progress_bar(encoded([documents], renderer), size)))


def with_progress_bar(parts: Iterator[Corpus], size: int) -> Iterator[Corpus]:
    """The parts as they come; where their text has many bytes, how far they are is shown, to stderr."""
    if size < LONG:
        yield from parts
        return
    with advancing("tokenising", size, Console(stderr=True)) as advance:
        for part in parts:
            yield part
            advance(int(part.widths.sum(dtype=int)))


def encoded(
    sources: Sequence[Iterable[Document | TextFile]],
    renderer: Renderer,
    split_seed: int = DataConfig.split_seed,
    skip: int = 0,
    flags: Sequence[str] = (),
) -> Iterator[Corpus]:
    """The stream of all documents, part by part; joined, the parts are the stream.

    Args:
        sources: documents, read as they are needed.
        renderer: of conversations, and its tokenizer for all texts.
        split_seed: of the order that fingerprints have.
        skip: pieces at the beginning that are read and not tokenised again.
        flags: that named each source, for messages; of none it is ``--data-dir``.

    Raises:
        UserError: as ``encode``, and what reading raises.
    """
    least = CHUNK if _may_be_cut(renderer.tokenizer) else LONG_CHUNK

    def pieces() -> Iterator[Piece]:
        for number, documents in enumerate(sources):
            with named_by(flags[number] if flags else "--data-dir"):
                for document in documents:
                    yield from pieces_of(document, number, renderer.render, split_seed, least)

    yield from parts_of(groups_of(islice(pieces(), skip, None), GROUP), renderer)


def _may_be_cut(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text in two gives the tokens of the whole; not where, for one, a space is put before each text."""
    backend = backend_of(tokenizer)
    return all(
        backend.encode(first + second, add_special_tokens=False).ids
        == [token for text in (first, second) for token in backend.encode(text, add_special_tokens=False).ids]
        for first, second in (("a.\n", "b"), ("a", " b"), ("a", "1"))
    )


def parts_of(groups: Iterable[list[Piece]], renderer: Renderer, at_once: int = AT_ONCE) -> Iterator[Corpus]:
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
    pending: deque[Future[Corpus]] = deque()
    try:
        for group in groups:
            pending.append(pool.submit(encoder.corpus, group))
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


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase, written: Places = ()) -> list[int]:
    """The token ids of a question in a chat, without an end of text.

    Args:
        text: as a chat template has rendered it.
        tokenizer: of the model.
        written: control tokens in it that are read as text.

    Raises:
        UserError: the chat template has made too much of it, or what ``encode`` raises.
    """
    if len(text) > LONGEST_CHAT:
        raise UserError(
            f"--chat: the chat template makes {len(text):,} characters of the question, more than the "
            f"{LONGEST_CHAT:,} that are tokenised at once; shorten it, or choose another template"
        )
    piece = Piece(text, "--chat", written=written, is_conversation=True)
    (encoding,) = _Encoder(tokenizer, SpecialTokens(tokenizer)).tokenised([piece])
    return encoding.ids


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids that a tokenizer puts before every text: none, or its beginning of text.

    Documents begin with them, and so does what is generated from: a model was trained on texts that do.
    """
    text = "a"
    bare, whole = tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer(text)["input_ids"]
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])


class _Encoder:
    """Makes a corpus of pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: SpecialTokens) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "--model: its tokenizer has no end-of-text token; name it as eos_token in tokenizer_config.json"
            )
        self.backend = backend_of(tokenizer)
        self.beginning = beginning(tokenizer)
        self.end: int = tokenizer.eos_token_id
        self.by_token = _bytes_by_token(self.backend)
        self.is_special = np.zeros(1 + max(tokenizer.get_vocab().values()), bool)
        self.is_special[tokenizer.all_special_ids] = True
        self.control = control
        self.may_be_cut = _may_be_cut(tokenizer)

    @cached_property
    def without_special_tokens(self) -> Any:
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
        if not self.may_be_cut:
            token = piece.text[slice(*piece.written[0])]
            raise UserError(
                f"--control-tokens text: {piece.name} holds the control token {token}, and the tokenizer of --model "
                "adds a space to what is tokenised apart from it; take it out, or choose tokens"
            )
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        bounds = [0, *(bound for place in piece.written for bound in place), len(piece.text)]
        for number, (start, stop) in enumerate(pairwise(bounds)):
            text = piece.text[start:stop]
            found = self._as_text(text, piece.name) if number % 2 else self._encoded(text)
            ids += found.ids
            offsets += [(begin + start, end + start) for begin, end in found.offsets]
        return SimpleNamespace(ids=ids, offsets=offsets)

    def _encoded(self, text: str) -> Any:
        return self.backend.encode(text, add_special_tokens=False)

    def _as_text(self, text: str, name: str) -> Any:
        found = self.without_special_tokens.encode(text, add_special_tokens=False)
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

    def corpus(self, group: list[Piece]) -> Corpus:
        """The tokens of a group of pieces, and the documents that end with one of them."""
        group = [self._looked_through(piece) for piece in group]
        full, rows, n_within = [], [], 0
        for piece, encoding in zip(group, self.tokenised(group), strict=True):
            if not piece.is_empty:
                full.append(piece)
                rows.append(self._row(piece, encoding))
                n_within += begun_within_a_token(encoding.offsets, piece.spans) if piece.spans else 0
        arrays = {
            name: np.concatenate([np.empty(0, OF_TOKENS[name]), *(row[at] for row in rows)])
            for at, name in enumerate(OF_TOKENS)
        }
        ends = np.cumsum([len(tokens) for tokens, *_ in rows], dtype=np.int64) - 1
        arrays["ends"] = ends[np.fromiter((piece.is_last for piece in full), bool, len(full))]
        return _described(arrays, group, [piece for piece in full if piece.is_last], n_within)

    def _row(self, piece: Piece, encoding: Any) -> tuple[NDArray[np.int32], NDArray[np.uint16], NDArray[np.bool_]]:
        """A piece's tokens, their bytes, and which are supervised, with the tokens that begin and end a text."""
        ids = encoding.ids
        before = self.beginning if piece.is_first and piece.is_begun else []
        is_ended = piece.is_conversation and ids[-1:] == [self.end]  # a template may have set the end of text already
        after = [self.end] if piece.is_last and piece.is_ended and not is_ended else []
        # By struct, which is faster than numpy at a list.
        tokens = np.frombuffer(struct.pack(f"={len(before) + len(ids) + len(after)}i", *before, *ids, *after), np.int32)
        text = slice(len(before), len(before) + len(ids))
        widths, targets = np.zeros(len(tokens), np.uint16), np.ones(len(tokens), bool)
        widths[text] = self._widths(piece, tokens[text], encoding)
        if piece.spans is not None:
            targets[text] = supervised(encoding.offsets, piece.spans)
            targets[text.stop :] = bool(piece.spans) and piece.spans[-1][1] == len(piece.text)
        if piece.is_first:  # nothing predicts the first, and of those before the text it says nothing
            targets[: max(len(before), 1)] = False
        return tokens, widths, targets

    def _widths(self, piece: Piece, tokens: NDArray[np.int32], encoding: Any) -> NDArray[np.uint16]:
        """UTF-8 bytes of the text that each token stands for; they add up to its text's."""
        n_bytes = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
        widths = None if self.by_token is None else self.by_token.take(tokens)
        if widths is None or widths.sum(dtype=int) != n_bytes:  # not made of bytes, or something was rewritten
            has_offsets = self.by_token is None or piece.written or piece.spans is not None
            offsets = (encoding if has_offsets else self._encoded(piece.text)).offsets
            widths = bytes_by_offset(piece.text, offsets)
        if piece.is_conversation:  # its marks are no text
            widths[self.is_special[tokens]] = 0
        return widths


def _described(arrays: dict[str, NDArray[Any]], group: list[Piece], documents: list[Piece], n_within: int) -> Corpus:
    """The corpus of these tokens, with what is known of the documents, of which these are the last pieces."""
    prints = [piece.fingerprint for piece in documents if piece.fingerprint]
    assert len(prints) == len(documents)
    facts = {
        "digests": [fingerprint.digest for fingerprint in prints],
        "bare": [fingerprint.bare for fingerprint in prints],
        "question": [fingerprint.question for fingerprint in prints],
        "places": [fingerprint.place for fingerprint in prints],
        "characters": [fingerprint.characters for fingerprint in prints],
        "sources": [piece.source for piece in documents],
        "is_chat": [piece.is_conversation for piece in documents],
    }
    empty = [piece.name for piece in group if piece.is_empty]
    written = [f"{piece.first_control} in {piece.name}" for piece in group if piece.n_control]
    return Corpus(
        **arrays,
        **{name: np.array(values, ARRAYS[name]) for name, values in facts.items()},
        names=[piece.name for piece in documents],
        counts=Counter(
            pieces=len(group),
            empty=len(empty),
            control=sum(piece.n_control for piece in group),
            reasoning=sum(piece.n_without_reasoning for piece in group),
            system=sum(piece.has_system for piece in group),
            within=n_within,
        ),
        firsts={name: found[0] for name, found in (("empty", empty), ("control", written)) if found},
        formats=Counter((piece.source, piece.record_format) for piece in documents if piece.record_format),
    )


def supervised(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens have a character of the spans, (tokens,)."""
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    found = np.zeros(len(starts), bool)
    for start, stop in spans:
        found |= (starts < stop) & (stops > start)
    return found


def begun_within_a_token(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> int:
    """How many of the spans begin within a token. A prompt that ends there is read as other tokens than before them."""
    starts = [start for start, _ in offsets]
    tokens = [(offsets[at - 1], begin) for begin, _ in spans if (at := bisect_left(starts, begin))]
    return sum(stop > begin for (_, stop), begin in tokens)


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
