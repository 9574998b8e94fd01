"""General text, on which drift is measured: what the base model writes by itself, or files of the user's."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import RunFailed, UserError
from granite_scu.config.settings import IGNORED, DataConfig
from granite_scu.config.untrusted_input import parse_json, read_file
from granite_scu.data.sources import read as sources
from granite_scu.data.tokens import corpus, templates
from granite_scu.data.tokens.encoding import backend_of
from granite_scu.data.tokens.stream import Corpus
from granite_scu.evaluation.answers import grouped
from granite_scu.evaluation.score import padded_length
from granite_scu.model.drift import READ_AT_ONCE, DriftBatches
from granite_scu.storage.atomic import replacing
from granite_scu.storage.run_folder import GENERAL_SCHEMA, is_general_text

AUTO = "auto"
"""The source of text that the base model wrote."""

LONGEST = 512
"""Tokens of a document; a longer text is cut into several."""

MIN_TOKENS = 128
"""Counted tokens of each part: a batch of the anchor's."""

LARGE = 1 / 8
"""Of all tokens: a text that has more has pieces in each part."""

WRITTEN_WITHIN = timedelta(hours=6)
"""What the other processes wait for the first to have it: the base model may write for longer than processes wait for
each other elsewhere."""

_SHARES = (0, 1), (2,), (3,)
"""Of each four documents those that anchor, that steer and that are held out."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """A text, or a question and its answer.

    Attributes:
        tokens: its ids.
        counted: of each token whether drift is measured where it is predicted; never of the first.
    """

    tokens: tuple[int, ...]
    counted: tuple[bool, ...]

    @classmethod
    def joined(cls, *parts: tuple[Sequence[int], bool]) -> "Document":
        """Stretches of tokens one after the other, each with whether it is counted."""
        return cls(*zip(*((token, counts) for tokens, counts in parts for token in tokens), strict=True))

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
        return _n_counted(self.documents)

    @property
    def digest(self) -> str:
        """By which a run that is continued knows its text again."""
        return hashlib.sha256(repr(self.documents).encode()).hexdigest()

    def parts(self) -> Parts:
        """Of each four documents two to anchor, one to steer and one held out."""
        return Parts(*(tuple(self.documents[place] for place in places) for places in _places(len(self.documents))))

    def batches(self, anchor: int, steering: int, padding: int) -> DriftBatches:
        """The parts in batches of so many positions; ``padding`` is a token id."""
        parts, read = self.parts(), batches(self.parts().held_out, READ_AT_ONCE, padding)
        return DriftBatches(
            anchor_batches(parts.anchor, anchor, padding), batches(parts.steering, steering, padding), read
        )

    def check(self, where: str, remedy: str = "give more text, or texts of more even length") -> "GeneralText":
        """The text, where each of its parts fills a batch. Raises UserError.

        Args:
            where: it is from: a flag or a file.
            remedy: what the user can do.
        """
        parts = self.parts()
        counts = [_n_counted(part) for part in (parts.anchor, parts.steering, parts.held_out)]
        if min(counts) < MIN_TOKENS:
            raise UserError(
                f"{where}: {len(self.documents)} texts with {self.n_counted:,} tokens to measure drift on are too few: "
                f"of the half that anchors, the quarter that steers and the quarter that is held out, the smallest has "
                f"{min(counts)} tokens, and a batch takes {MIN_TOKENS}; {remedy}"
            )
        return self

    def write(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write it as JSON lines: where it is from, then a document a line, with its text for whoever looks at it."""
        lines = [json.dumps(_header(tokenizer) | {"source": self.source})]
        for document in self.documents:
            record = {
                "text": tokenizer.decode(document.tokens),
                "tokens": document.tokens,
                "counted": spans(document.counted),
            }
            lines.append(json.dumps(record, ensure_ascii=False))
        with replacing(path) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path, tokenizer: PreTrainedTokenizerBase, rows: int | None = None) -> GeneralText:
    """General text from the file that ``GeneralText.write`` has written.

    Args:
        path: the file.
        tokenizer: of the model, with the chat template in use.
        rows: of the model's embedding; None where nobody knows.

    Raises:
        UserError: it is not there, damaged, or of another tokenizer or chat template.
    """
    lines = read_file(path).decode(errors="replace").removesuffix("\n").split("\n")  # a text may have U+2028
    try:
        header, *records = map(parse_json, lines)
        source, ours = str(header["source"]), _header(tokenizer)
        if header["schema"] != GENERAL_SCHEMA:
            raise ValueError("it is of another version")
        documents = tuple(_document(record) for record in records)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); delete it, or copy it again") from error
    for name, what in (("template", "chat template"), ("tokenizer", "tokenizer")):
        if header.get(name) != ours[name]:
            raise UserError(
                f"{path}: this general text was made with another {what} than the run's; leave it out, so that the "
                "base model writes one, or give files of text or chats by --general-data"
            )
    largest = max((max(document.tokens) for document in documents), default=0)
    if rows is not None and largest >= rows:
        raise UserError(f"{path}: has a token of the number {largest}, and the model has {rows:,}; copy it again")
    return GeneralText(documents, source)


def of_first_process(first: bool, find: Callable[[], GeneralText]) -> GeneralText:
    """General text, the same in each process.

    Args:
        first: whether this process is the one that finds it, which is that of rank 0.
        find: does.

    Raises:
        UserError: there is none to be had; in every process.
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    # Made before the first begins: to make it, they wait for each other too.
    patient = torch.distributed.new_group(backend="gloo", timeout=WRITTEN_WITHIN) if several else None
    found: GeneralText | UserError | None = None
    if first:
        try:
            found = find()
        except UserError as error:  # the other processes wait to be told
            found = error
    if several:
        torch.distributed.broadcast_object_list(told := [found], group=patient)
        (found,) = told
    if not isinstance(found, GeneralText):
        raise found or RunFailed("the first process has no general text")
    return found


def _header(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    digest = hashlib.sha256(backend_of(tokenizer).to_str().encode()).hexdigest()[:16]
    return {"schema": GENERAL_SCHEMA, "template": templates.checksum(tokenizer), "tokenizer": digest}


def _places(count: int) -> list[list[int]]:
    """Of so many documents those of each part."""
    return [[place for place in range(count) if place % 4 in share] for share in _SHARES]


def spans(counted: Sequence[bool]) -> list[list[int]]:
    """[start, stop) of each stretch that is counted."""
    borders = [at for at, (before, now) in enumerate(pairwise([False, *counted, False])) if before != now]
    return [list(span) for span in zip(borders[::2], borders[1::2], strict=True)]


def _document(record: dict[str, Any]) -> Document:
    tokens = tuple(record["tokens"])
    if len(tokens) < 2 or not all(isinstance(token, int) and 0 <= token < 2**31 for token in tokens):
        raise ValueError("its tokens are no whole numbers")
    counted = np.zeros(len(tokens), bool)
    for start, stop in record["counted"]:
        counted[int(start) : int(stop)] = True
    return Document(tokens, tuple(counted.tolist()))


def of_files(
    names: Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    seed: int,
    *,
    rows: int | None = None,
    trained_on: NDArray[np.uint64] | None = None,
) -> GeneralText:
    """General text from the user's files, in any format that data may have.

    A sample of pieces of at most ``LONGEST`` tokens each, until they have ``tokens`` that are counted: of chats what
    the assistant says, of texts all. Copies of a text are left out. Its pieces are in one part, but where it is
    ``LARGE`` or fits into none.

    Args:
        names: files, folders or patterns, as ``--data-dir``; or one that ``GeneralText.write`` has written.
        data: how the run reads text: its encoding, text column, control tokens, cache, and what of a chat is learned.
        tokenizer: of the model, with the chat template in use.
        tokens: that are counted, in all.
        seed: of the sample.
        rows: of the model's embedding; None where nobody knows.
        trained_on: texts that the run trains on, see ``Division.trained_on``; a warning has the number of those here.

    Raises:
        UserError: what reading raises, or too little text for a batch of each part.
    """
    if len(names) == 1 and is_general_text(names[0]):
        return read(Path(names[0]).expanduser(), tokenizer, rows).check(f"--general-data {names[0]}")
    alike = ("encoding", "cache_dir", "text_column", "loss_on", "control_tokens")
    with sources.named_by("--general-data"):
        found = corpus.prepare(DataConfig(path=list(names), **{name: getattr(data, name) for name in alike}), tokenizer)
    if trained_on is not None and (shared := int(np.isin(found.bare, trained_on).sum())):
        _log.warning(
            "--general-data %s: %d of its %d texts are trained on too, where drift is what training is for; leave them "
            "out",
            *(" ".join(names), shared, found.n_documents),
        )
    documents = _sampled(found, tokens, np.random.default_rng(seed))
    text = GeneralText(documents, " ".join(names))
    _log.info("general text: %s, %d pieces with %d tokens", text.source, len(text.documents), text.n_counted)
    if text.n_counted >= tokens:  # the files may have more
        return text.check(f"--general-tokens {tokens}", "raise it")
    return text.check(f"--general-data {text.source}")


def _sampled(found: Corpus, tokens: int, random: np.random.Generator) -> tuple[Document, ...]:
    """Pieces of the different documents, drawn at random."""
    bounds = found.bounds_of(np.sort(np.unique(found.bare, return_index=True)[1]))
    pieces = -(-(bounds[:, 1] - bounds[:, 0]) // LONGEST)
    owners = np.repeat(np.arange(len(bounds)), pieces)
    starts = bounds[owners, 0] + LONGEST * (np.arange(len(owners)) - np.repeat(pieces.cumsum() - pieces, pieces))
    drawn: dict[int, dict[int, Document]] = {}
    counted = 0
    for number in random.permutation(len(owners)).tolist():
        if counted >= tokens:
            break
        start, stop = int(starts[number]), int(min(starts[number] + LONGEST, bounds[owners[number], 1]))
        targets = found.targets[start:stop].copy()
        targets[0] = False  # nothing predicts it
        if targets.any():
            piece = Document(tuple(found.tokens[start:stop].tolist()), tuple(targets.tolist()))
            drawn.setdefault(int(owners[number]), {})[start] = piece
            counted += int(targets.sum())
    return _by_texts([[text[start] for start in sorted(text)] for text in drawn.values()], random)


def _by_texts(texts: Sequence[Sequence[Document]], random: np.random.Generator) -> tuple[Document, ...]:
    """The pieces of all texts in an order by which ``GeneralText.parts`` has those of a text in one part.

    The largest come first, each to the part that has the fewest tokens for its share. A text with more than ``LARGE``
    of all tokens, as a single book, is spread: whole, it would leave the other parts too few.
    """
    large = LARGE * sum(map(_n_counted, texts))
    units = [
        unit for text in texts for unit in ([[piece] for piece in text] if _n_counted(text) > large else [list(text)])
    ]
    rooms = [random.permutation(places).tolist() for places in _places(sum(map(len, texts)))]
    loads, ordered = [0.0] * len(rooms), {}
    for unit in sorted(units, key=_n_counted, reverse=True):
        rest = unit
        while rest:
            fitting = [part for part, room in enumerate(rooms) if len(room) >= len(rest)]
            part = min(fitting or [part for part, room in enumerate(rooms) if room], key=loads.__getitem__)
            now, rest = rest[: len(rooms[part])], rest[len(rooms[part]) :]
            loads[part] += _n_counted(now) / len(_SHARES[part])
            ordered |= {rooms[part].pop(): piece for piece in now}
    return tuple(ordered[place] for place in range(len(ordered)))


def _n_counted(documents: Sequence[Document]) -> int:
    return sum(document.n_counted for document in documents)


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
    fitting = grouped(documents, lambda rows: len(rows) * _width(rows) <= tokens)
    return [_batch(rows, padding) for rows in fitting]


def anchor_batches(documents: Sequence[Document], tokens: int, padding: int) -> list[dict[str, Tensor]]:
    """The same of pieces of the documents: a step pays for a batch, which has not many more than ``tokens`` positions.

    A document of more than that, and than ``MIN_TOKENS`` tokens, is cut; pieces in which nothing counts are left out.
    """
    longest = max(tokens, MIN_TOKENS)
    cuts = [
        (slice(start, start + longest + 1), document)
        for document in documents
        for start in range(0, len(document.tokens) - 1, longest)
    ]
    cut = [Document(document.tokens[part], (False, *document.counted[part][1:])) for part, document in cuts]
    return batches([piece for piece in cut if piece.n_counted], tokens, padding)


def _width(rows: Sequence[Document]) -> int:
    return padded_length(max(len(document.tokens) for document in rows) - 1)


def _batch(rows: Sequence[Document], padding: int) -> dict[str, Tensor]:
    shape = len(rows), _width(rows)
    inputs, labels = torch.full(shape, padding), torch.full(shape, IGNORED)
    for row, document in enumerate(rows):
        tokens, counted = torch.tensor(document.tokens), torch.tensor(document.counted)
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, : len(tokens) - 1] = tokens[1:].masked_fill(~counted[1:], IGNORED)
    return {"input_ids": inputs, "labels": labels}
