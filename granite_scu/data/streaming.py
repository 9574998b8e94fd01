"""``--stream``: training text that is read, tokenised and packed during training, and kept nowhere.

For text that is larger than the disk. Its beginning is read before training: of that, whole documents are held out for
validation and test, as ``splitting`` divides them, and training skips them and their copies wherever they are.

Each of the S = ranks x loader processes shares takes every S-th document, and every S-th megabyte of a file that is one
document, so that nothing is read by two of them. Where a share of the stream stands is a function of the seed and of
the number of batches it has given; continuing from a checkpoint reads up to there again.
"""

import hashlib
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, zip_longest
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.control.units import counted
from granite_scu.data.blocks.filtering import blocks_of, left_out
from granite_scu.data.blocks.packing import Block, Blocks, Layout, padding_of
from granite_scu.data.blocks.splitting import MIN_DOCUMENTS, Division
from granite_scu.data.datamodule import TextDataModule
from granite_scu.data.sources.documents import Document, TextFile
from granite_scu.data.sources.hub import is_on_hub
from granite_scu.data.sources.read import in_memory, sources_of
from granite_scu.data.tokens.chat import Renderer
from granite_scu.data.tokens.corpus import check_documents
from granite_scu.data.tokens.encoding import encoded, parts_of, require_known
from granite_scu.data.tokens.pieces import Piece, groups_of, pieces_of
from granite_scu.data.tokens.stream import Corpus, joined
from granite_scu.data.workers import PATIENCE

BEGINNING = 4_000_000
"""Characters read before training, of which a tenth each is held out for validation and for test."""

PATIENCE_WITH_THE_HUB = 600.0
"""Seconds, as ``PATIENCE``: the hub's library itself waits for minutes before it gives up."""

PASSED_OVER = 100
"""Files too long for memory after which no more whole documents are looked for."""

SHARED = 1_000_000
"""Characters of a file too long for memory that go to one share, and of whole documents that are laid out together; a
loader process tokenises on its own and gains nothing by shorter pieces."""

WINDOW = 512
"""Blocks that the next one is drawn from."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def beginning(config: DataConfig) -> list[list[Document]]:
    """The first documents of a stream, or of each of its splits where it comes divided; training reads them again.
    Files that are validated or tested on are read whole.

    Raises:
        UserError: nothing to read, or what cannot be read.
    """
    sources = sources_of(config)
    together = [source.read for source in sources if not source.split]
    first = [list(_first(document for _, document in in_turn(together)))] if together else []
    divided = [source for source in sources if source.split]
    return first + [in_memory(each.read()) if each.files else list(_first(each.read())) for each in divided]


def in_turn(readers: Iterable[Callable[[], Iterable[T]]]) -> Iterator[tuple[int, T]]:
    """One of each source after the other, with the source's number, until the last has ended.

    >>> list(in_turn([lambda: "ab", lambda: "c"]))
    [(0, 'a'), (1, 'c'), (0, 'b')]
    """
    for row in zip_longest(*(reader() for reader in readers)):
        yield from ((number, found) for number, found in enumerate(row) if found is not None)


def _first(documents: Iterable[Document | TextFile]) -> Iterator[Document]:
    """Whole documents until ``BEGINNING`` characters are read; some files that alone have more are passed over."""
    n_characters = n_long = 0
    for document in documents:
        known = as_document(document)
        if isinstance(known, Document):
            yield known
            n_characters += len(known.text)
        else:
            n_long += 1
        if n_characters >= BEGINNING or n_long >= PASSED_OVER:
            return


def as_document(document: Document | TextFile) -> Document | TextFile:
    """A file as a document, unless it has more than ``BEGINNING`` characters."""
    if isinstance(document, Document):
        return document
    text = ""
    for more in document.pieces():
        text += more
        if len(text) > BEGINNING:
            return document
    return Document(document.name, text)


def shuffled(items: Iterable[T], draw: random.Random, window: int = WINDOW) -> Iterator[T]:
    """All items, each drawn from those that ``window`` holds."""
    held: list[T] = []
    for item in items:
        if len(held) < window:
            held.append(item)
            continue
        place = draw.randrange(window)
        held[place], item = item, held[place]
        yield item
    draw.shuffle(held)
    yield from held


@dataclass(eq=False)
class StreamedBlocks(IterableDataset):
    """Training blocks of a stream, without end; each loader process has a share of its own.

    Attributes:
        config: the text and how it is cut.
        tokenizer: of the model.
        layout: of the documents of a megabyte of text.
        held_out: texts that are not trained on, as ``Division.held_out``.
        seed: of the order of blocks.
        rank: this process's number.
        world_size: processes that share the stream.
        start: batches that this rank has trained on.
        rows: of the model's embedding; None where nobody knows.
        model: its name.
    """

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    layout: Layout
    held_out: frozenset[int]
    seed: int
    rank: int = 0
    world_size: int = 1
    start: int = 0
    rows: int | None = None
    model: str = ""

    def __post_init__(self) -> None:
        self.readers = [source.read for source in sources_of(self.config) if source.split in ("", "train")]
        self.renderer = Renderer(self.tokenizer, self.config.loss_on, self.config.control_tokens)

    def __iter__(self) -> Iterator[Block]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        # The loader takes a batch of each process in turn, and after a restart begins with the first again.
        return self._left((number + self.start) % count, count, self.start)

    def batches(self, given: int, processes: int) -> Iterator[list[Block]]:
        """What so many loader processes give after the first ``given`` batches, read in this one."""
        first = self.start + given
        shares = [self._left(number, processes, first) for number in range(processes)]
        return (list(islice(shares[batch % processes], self.config.batch_size)) for batch in count(first))

    def _left(self, number: int, of: int, batch: int) -> Iterator[Block]:
        """What is left of one of a rank's shares when all together have given so many batches."""
        given = len(range(number, batch, of)) * self.config.batch_size
        return islice(self.share(self.rank * of + number, self.world_size * of), given, None)

    def share(self, number: int, of: int) -> Iterator[Block]:
        """The blocks of a share, pass after pass. Raises UserError where nothing of the stream falls to it."""
        for epoch in count():
            block = None
            for block in shuffled(self._in_order(number, of), random.Random(f"{self.seed}/{number}/{epoch}")):
                yield block
            if block is None:
                raise UserError(
                    f"--stream: --data-dir {self.config.named} has too few documents to learn from for {of} shares "
                    "(processes times --num-workers); start fewer, or leave --stream out"
                )
            if number == 0:
                _log.info("the stream of %s has ended and begins again", self.config.named)

    def _in_order(self, number: int, of: int) -> Iterator[Block]:
        counts: Counter[str] = Counter()
        groups = groups_of(self._pieces(number, of), SHARED, whole=True)
        cut = self.config.block_size, self.config.on_long
        for part in parts_of(groups, self.renderer, at_once=1):  # each loader process has a core
            require_known(part.tokens, self.tokenizer, self.rows, self.model)
            every, padding = np.arange(part.n_documents), padding_of(self.tokenizer, self.rows)
            blocks, kinds = blocks_of(part, every, self.layout, padding, *cut, part.names)
            told = (
                (part.counts["empty"], "empty documents left out"),
                (part.counts["control"], f"control tokens that somebody wrote, read as {self.config.control_tokens}"),
                (part.counts["reasoning"], "answers shown by the chat template without what was thought before them"),
            )
            for n, words in (*told, *left_out(kinds, self.layout, *cut)):
                before, counts[words] = counts[words], counts[words] + n
                if n and (not before or len(str(before + n)) > len(str(before))):  # the first, and each digit more
                    _log.warning("share %d of %d of the stream: %s so far: %d", number + 1, of, words, before + n)
            yield from blocks

    def _pieces(self, number: int, of: int) -> Iterator[Piece]:
        """The share's part of a pass, without what is held out."""
        turn = count()
        for source, document in in_turn(self.readers):
            known = as_document(document)
            if isinstance(known, Document):
                if next(turn) % of == number and not {known.bare, known.question} & self.held_out:
                    yield from pieces_of(known, source, self.renderer.render, self.config.split_seed, SHARED)
                continue
            for piece in pieces_of(known, source, self.renderer.render, self.config.split_seed, SHARED):
                if next(turn) % of == number:  # what comes before it may be in another share: a text of its own
                    yield piece._replace(is_first=True, is_last=True, is_begun=piece.is_first, is_ended=piece.is_last)


class StreamedDataModule(TextDataModule):
    """Training blocks of a stream; validation and test blocks of documents at its beginning.

    ``train`` has the blocks of the beginning alone, as a sample of what is trained on.

    Args:
        config: the text and how it is cut.
        seed: of the order of training blocks.
    """

    def divide(self, tokenizer: PreTrainedTokenizerBase) -> Division:
        """The beginning divided.

        Raises:
            UserError: too few documents to hold whole ones out, nothing to read, or what cannot be read.
        """
        config, sources = self.config, sources_of(self.config)
        files = [file for source in sources if source.split in ("", "train") for file in source.files or ()]
        sizes = "".join(f"{file.name} {file.stat().st_size}\n" for file in files)
        self.files = hashlib.sha256(sizes.encode(errors="surrogateescape")).hexdigest()
        renderer = Renderer(tokenizer, config.loss_on, config.control_tokens)
        splits = list(dict.fromkeys(source.split for source in sources if not source.split))
        splits += [source.split for source in sources if source.split]
        flags = [config.named_for(split)[0] for split in splits]
        if not (parts := list(encoded(beginning(config), renderer, config.split_seed, flags=flags))):
            raise self._too_few(0)
        corpus = joined(parts)
        check_documents(config, corpus, tokenizer)
        division = self._divided(corpus, splits, streamed=True)
        if division.parts is None:
            raise self._too_few(corpus.n_documents)
        return division

    def _too_few(self, n_documents: int) -> UserError:
        found = counted(n_documents, "whole document")
        return UserError(
            f"--stream: the beginning of --data-dir {self.config.named} has {found} of up to "
            f"{BEGINNING // 1_000_000} million characters, of which none can be held out for validation; give "
            f"{MIN_DOCUMENTS} or more of even length, for example as lines of a jsonl file, or leave --stream out"
        )

    def _blocks_of(
        self, corpus: Corpus, layout: Layout, padding: int, split: str, documents: NDArray[np.int64]
    ) -> Blocks:
        if not len(documents) and self.holds_out(split):
            raise UserError(f"--stream: --data-dir {self.config.named} begins without text for {split}; give more")
        return super()._blocks_of(corpus.select(documents), layout, padding, split, np.arange(len(documents)))

    @property
    def on_long(self) -> str:
        """As the base class's; but a stream may have longer conversations than its beginning, and none is cut."""
        return "drop" if self.config.on_long == "auto" and self.chats else super().on_long

    def train_dataloader(self) -> DataLoader:
        """Batches without end."""
        rank, world_size = self._rank_and_world_size()
        layout, texts = self._layout(self.division.corpus.n_conversations), self.division.held_out
        place = rank, world_size, self.start_batch
        config = replace(self.config, on_long=self.on_long)
        of_model = {"rows": self.rows, "model": self.model_name}
        blocks = StreamedBlocks(config, self._tokenizer, layout, texts, self.seed, *place, **of_model)
        from_hub = not self.config.sources or any(map(is_on_hub, self.config.sources))
        patience = PATIENCE_WITH_THE_HUB if from_hub else PATIENCE
        return self._loader(blocks, batch_size=self.config.batch_size, patience=patience)

    @staticmethod
    def begin_worker(worker: int) -> None:
        """A loader process tokenises on its own core: the threads of the process it was forked from are not there."""
        TextDataModule.begin_worker(worker)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
