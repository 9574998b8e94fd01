"""The data of a run, as Lightning wants it: read, split, packed, and served in batches."""

import copy
import hashlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED, MAX_BLOCK, MIN_BLOCK, DataConfig
from granite_scu.control.units import counted
from granite_scu.data.blocks.filtering import blocks_of, left_out, repeated, taught
from granite_scu.data.blocks.packing import Block, Blocks, Layout, best_fit, in_a_row, padding_of
from granite_scu.data.blocks.sampling import EndlessBatches, Epochs, Order
from granite_scu.data.blocks.splitting import Division, by_block, divide, min_blocks
from granite_scu.data.sources.documents import SPLITS
from granite_scu.data.sources.read import sources_of
from granite_scu.data.tokens.corpus import prepare
from granite_scu.data.tokens.encoding import require_known
from granite_scu.data.tokens.stream import Corpus
from granite_scu.data.workers import SteadyLoader, leave_signals_to_the_run

_log = logging.getLogger(__name__)

EMPTY = -1
"""Number of a block that counts nowhere: ranks whose share is a batch short, or that have none, take one pass with it.
All must gather the weights of a base model in shares together, and a rank without a batch, on which Lightning skips
evaluation, would be waited for without end."""


class TextDataModule(LightningDataModule):
    """Training, validation and test blocks of one corpus.

    A batch is a dict of ``input_ids`` and ``labels``, both (B, block_size) int64; labels are shifted already. Where
    documents are kept apart and any block holds several, ``documents`` has their numbers.
    The Trainer needs ``use_distributed_sampler=False``: the loaders share the blocks out between ranks.

    Args:
        config: the text and how it is cut.
        seed: of the order of training blocks. The split does not depend on it.

    Attributes:
        start_batch: micro-batches that each rank has trained on already; training continues after them.
        uniform_batches: every batch has ``documents``, or none: a compiled model is compiled for one kind of batch.
        division: the documents of each split, once ``prepare`` was called.
        lengths: (documents,) tokens of each document of all splits, of a conversation up to the last that is learned.
        train, validation, test: the blocks of each, from then on; of training those of the first epoch.
        epochs: the training blocks of each epoch.
        files: of what is streamed, which is not all read before training, a checksum of names and sizes of its files.
    """

    division: Division
    lengths: NDArray[np.int64]
    train: Blocks
    validation: Blocks
    test: Blocks
    epochs: Epochs
    files: str

    begin_worker: Callable[[int], None] = staticmethod(leave_signals_to_the_run)
    """Called in each loader process before anything else."""

    def __init__(self, config: DataConfig, seed: int, uniform_batches: bool = False) -> None:
        super().__init__()
        self.config = config
        self.seed = seed
        self.start_batch = 0
        self.uniform_batches = uniform_batches
        self._left_out: Counter[str] = Counter()
        self._of_epoch: Callable[[int], Blocks] | None = None
        self.rows: int | None = None
        self.model_name = ""

    def served(self, **how: int) -> "TextDataModule":
        """The same prepared data in other micro-batches, or by other processes; ``how`` are fields of its settings."""
        other = copy.copy(self)
        other.config = replace(self.config, **how)
        return other

    def prepare(self, tokenizer: PreTrainedTokenizerBase, rows: int | None = None, model: str = "") -> None:
        """Read, tokenise, divide and cut the corpus. Once on every rank, before anything else here is used.

        Not Lightning's ``prepare_data``: N, the number of tokens, is wanted before there is a Trainer.
        ``read``, ``grow`` and ``cut`` after one another, for whom nothing else decides how it is cut.

        Args:
            tokenizer: of the model.
            rows: of the model's embedding; None where nothing is trained or scored.
            model: its name.

        Raises:
            UserError: nothing to read, a file that cannot be read, too little text for the block size, or a token that
                the model does not have.
        """
        self.read(tokenizer, rows, model)
        self.grow()
        self.cut(tokenizer, self.config)

    def read(self, tokenizer: PreTrainedTokenizerBase, rows: int | None = None, model: str = "") -> None:
        """Read, tokenise and divide the corpus; as ``prepare``."""
        self.rows, self.model_name, self._tokenizer = rows, model, tokenizer
        self.division = self.divide(tokenizer)
        corpus = self.division.corpus
        require_known(corpus.tokens, tokenizer, rows, model)
        bounds = corpus.bounds
        bounds[corpus.is_chat] = taught(corpus.targets, bounds[corpus.is_chat])
        self.lengths = np.diff(bounds)[:, 0]

    def grow(self, asked_for: bool = False, most: int | None = None) -> None:
        """Make the block as long as the longest conversation, so that none is cut, unless ``on_long`` says otherwise.

        Args:
            asked_for: the block size is the user's, and stays.
            most: tokens that the model was made for; None where it knows no position.

        Raises:
            UserError: a conversation is longer than the block that was asked for, or than the model takes.
        """
        config, longest = self.config, self.longest_chat
        if config.on_long != "auto" or longest <= config.block_size:
            return
        n_long = f"the longest of {counted(self.chats, 'conversation')} has {longest:,} tokens"
        others = "choose what becomes of longer ones by --on-long drop, truncate or split"
        most = min(most or MAX_BLOCK, MAX_BLOCK)
        if longest > most:
            raise UserError(f"--data-dir {config.named}: {n_long}, and {self.model_name} takes {most:,}; {others}")
        size = min(-(-longest // 64) * 64, most)  # a multiple of 64, as products like them
        if asked_for:
            raise UserError(
                f"--block-size {config.block_size}: {n_long}, and conversations are not cut; --block-size {size} holds "
                f"all of them, or {others}"
            )
        self.config = replace(config, block_size=size)

    @property
    def filled(self) -> int:
        """Blocks that an epoch has to fill, and more: one, and where blocks are held out, so many that one is."""
        return 1 if self.division.parts is not None else min_blocks(_each(self.config)) - 1

    def cut(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        """Make the blocks of what was read, as ``config`` has them; as ``prepare``."""
        self._left_out, self.config, self._of_epoch = Counter(), config, None
        if any(weight % 1 for weight in config.weights or []):
            layout, padding = self._layout(self.chats), padding_of(tokenizer, self.rows)
            how = {"layout": layout, "padding": padding, "on_long": self.on_long}
            self._of_epoch = partial(blocks_of_epoch, division=self.division, config=config, **how)
        blocks = self.make_blocks(self.division, tokenizer)
        self.train, self.validation, self.test = (blocks[name] for name in SPLITS)
        self.epochs = Epochs(self.train, self._of_epoch)

    def divide(self, tokenizer: PreTrainedTokenizerBase) -> Division:
        """The documents of each split."""
        first_rank = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        sources = sources_of(self.config)
        corpus = prepare(self.config, tokenizer, first_rank, sources)
        return self._divided(corpus, [source.split for source in sources])

    def _divided(self, corpus: Corpus, splits: list[str], streamed: bool = False) -> Division:
        config = self.config
        _check_kinds(config, corpus, splits)
        assert not isinstance(config.held_out_share, str)
        return divide(corpus, splits, config.named, config.held_out_share, config.doubles, streamed)

    def make_blocks(self, division: Division, tokenizer: PreTrainedTokenizerBase) -> dict[str, Blocks]:
        """The blocks of each split, by its name."""
        config, corpus, parts = self.config, division.corpus, division.parts
        layout = self._layout(division.corpus.n_conversations)
        laid_out = partial(self._blocks_of, corpus, layout, padding_of(tokenizer, self.rows))
        if parts is None:
            if config.weights:
                raise UserError(
                    f"--data-weights: {config.named} has too few or too uneven documents to be split by document, and "
                    "none can be read more often than another; give records of a jsonl file, or leave the weights out"
                )
            blocks = tail_held_out(laid_out("all", np.arange(corpus.n_documents)), config)
        else:
            read = self.epoch
            if self._of_epoch:  # what any epoch reads is looked at now
                read = parts["train"][np.array(config.weights)[corpus.sources[parts["train"]]] > 0]
            blocks = {name: laid_out(name, documents) for name, documents in (parts | {"train": read}).items()}
            if self._of_epoch:
                blocks["train"] = self._of_epoch(0)
        self._check(blocks, at_least=1 if layout is best_fit else config.block_size + 1)
        return blocks | {"train": thinned(blocks["train"], config.train_tokens)}

    def _layout(self, n_conversations: int) -> Layout:
        packing = self.config.packing
        wants_best_fit = packing == "best-fit" or (packing == "auto" and n_conversations)
        return best_fit if wants_best_fit else in_a_row

    @property
    def on_long(self) -> str:
        """What becomes of long documents, once the block has room for every conversation."""
        return "split" if self.config.on_long == "auto" else self.config.on_long

    def _blocks_of(
        self, corpus: Corpus, layout: Layout, padding: int, split: str, documents: NDArray[np.int64]
    ) -> Blocks:
        config, cut = self.config, (self.config.block_size, self.on_long)
        blocks, counts = blocks_of(corpus, documents, layout, padding, *cut, corpus.names)
        for count, words in left_out(counts, layout, *cut):
            _log.warning("%s: %s: %d", split, words, count)
        if config.on_long == "drop" and counts["long"] and not len(blocks):
            raise UserError(
                f"--on-long drop: every document ({split}: {counts['long']}) is longer than --block-size "
                f"{config.block_size}, and none is left; raise --block-size, or choose split or truncate"
            )
        self._left_out += counts
        return blocks

    def _check(self, blocks: dict[str, Blocks], at_least: int) -> None:
        """Refuse splits that nothing can be learned from, or measured on."""
        config, train = self.config, blocks["train"]
        for name, part in blocks.items():
            if not part.n_supervised and self.holds_out(name):
                raise UserError(
                    f"{' '.join(config.named_for(name))}: the {name} split has no token to learn or to measure on; "
                    "give more documents, messages in which the assistant speaks within --block-size, or --loss-on all"
                )
        if train.n_inputs < at_least:  # in a row each input needs the token after it as its label
            raise UserError(
                f"--data-dir {config.named}: the training split has {train.n_inputs} tokens, too few for one "
                f"block of --block-size {config.block_size}; {_more_text(train.n_inputs, 1, config.block_size)}"
            )

    def check_validation(self, n_blocks: int) -> None:
        """Refuse validations that read so many blocks, without a token to measure on: they would always be the best."""
        read = (self.validation[number] for number in range(min(n_blocks, len(self.validation))))
        if self.holds_out("validation") and not any((block.labels != IGNORED).any() for block in read):
            raise UserError(
                f"--eval-iters: the {n_blocks} blocks that a validation reads have no token to measure on; give more, "
                "or a larger --block-size"
            )

    def holds_out(self, split: str) -> bool:
        """Whether there is to be a split, which the settings alone decide."""
        config = self.config
        return split == "train" or config.held_out_share != 0 or split in config.files or config.doubles

    @property
    def epoch(self) -> NDArray[np.int64]:
        """The documents that the first epoch reads, see ``read_in``."""
        return read_in(0, self.division, self.config.weights)

    @property
    def chats(self) -> int:
        """Documents that are conversations."""
        return self.division.corpus.n_conversations

    @property
    def kind(self) -> str:
        """What the documents are called: conversations where all are."""
        return "conversation" if self.chats == self.division.corpus.n_documents else "document"

    @property
    def longest_chat(self) -> int:
        """Tokens that a block must have to hold every conversation whole; 0 without any. Known once it is ``read``."""
        return int((self.lengths[self.division.corpus.is_chat] - 1).max(initial=0))  # the last token is a label alone

    @property
    def n_tokens(self) -> int:
        """N: supervised tokens of the training split, over all ranks."""
        return self.train.n_supervised

    @property
    def checksum(self) -> str:
        """Of the blocks trained on and validated on; where epochs differ, of what decides those of the others too."""
        found = f"{self.train.checksum()}-{self.validation.checksum()}"
        if self._of_epoch and self.division.parts:
            others = repr(self.config.weights).encode() + self.division.parts["train"].tobytes()
            found += f"-{hashlib.sha256(others).hexdigest()[:16]}"
        return found

    def record(self) -> Iterator[str]:
        """The documents of each split, see ``Division.record``."""
        return self.division.record()

    def summary(self) -> dict[str, Any]:
        """Counts for the log and the run folder: how it was split, what was left out, and each split's size.

        Of training text that is streamed there is no size, for nobody has counted it.
        """
        division = self.division
        return {
            "path": self.config.named,
            "split_by": division.by,
            "test_is_validation": self.config.doubles,
            "block_size": self.config.block_size,
            "record_formats": dict(division.corpus.record_formats()),
            "kind": self.kind,
            "conversations": self.chats,
            "empty_documents": division.corpus.counts["empty"],
            "control_tokens_written": division.corpus.counts["control"],
            "thoughts_left_out": division.corpus.counts["reasoning"],
            "copies_left_out": division.n_copies,
            "gap_blocks": 2 if division.by == "block" else 0,
            "long_documents": self._left_out["long"],
            "dropped_tokens": self._left_out["dropped"] + self._left_out["unused"],
            "cut_answers": self._left_out["cut"],
            "unsupervised_documents": self._left_out["unsupervised"],
            **{
                name: {
                    "documents": part.n_documents,
                    "copies": _n_copies(part),
                    "blocks": part.n_blocks,
                    "supervised_tokens": part.n_supervised,
                    "bytes": part.n_bytes,
                    "utilisation": round(part.utilisation, 4),
                }
                for name, part in zip(SPLITS, (self.train, self.validation, self.test), strict=True)
            },
            **({"train": {"streamed": True}} if division.streamed else {}),
        }

    def train_dataloader(self) -> DataLoader:
        """Batches without end, reshuffled every epoch."""
        rank, world_size = self._rank_and_world_size()
        order, size = Order(self.epochs.size, self.seed), self.config.batch_size
        batch = partial(order.batch, batch_size=size, rank=rank, world_size=world_size)
        return self._loader(self.epochs, batch_sampler=EndlessBatches(batch, self.start_batch))

    def val_dataloader(self) -> DataLoader:
        """The validation blocks in order, shared out between ranks: rank r has blocks r, r + W, r + 2 W, ..."""
        return self._loader(_WithEmpty(self.validation), batch_sampler=self._in_order(self.validation))

    def test_dataloader(self) -> DataLoader:
        """The test blocks in order, shared out as in validation."""
        return self._loader(_WithEmpty(self.test), batch_sampler=self._in_order(self.test))

    @property
    def collate(self) -> Callable[[list[Block]], dict[str, Tensor]]:
        """Makes a batch of blocks."""
        return partial(collate, isolate=self.config.isolate_documents, uniform=self.uniform_batches)

    def _rank_and_world_size(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _in_order(self, blocks: Blocks) -> list[list[int]]:
        rank, world_size = self._rank_and_world_size()
        mine = list(range(rank, len(blocks), world_size))
        size = self.config.eval_batch_size or self.config.batch_size
        batches = [mine[i : i + size] for i in range(0, len(mine), size)]
        most = math.ceil(len(range(0, len(blocks), world_size)) / size)  # rank 0's
        return batches + [[EMPTY]] * (most - len(batches))

    def _loader(self, blocks: Any, **batching: Any) -> DataLoader:
        """A loader of blocks; ``batching`` says how they come together, in the DataLoader's own words."""
        workers: dict[str, Any] = {}
        if self.config.num_workers:
            largest = max(self.config.batch_size, self.config.eval_batch_size or 0)
            workers["batch_bytes"] = 3 * 8 * largest * self.config.block_size  # inputs, labels, documents: int64
            workers |= {"persistent_workers": True, "worker_init_fn": self.begin_worker}
            # Silences a warning that tokenizers print in every forked worker; ours tokenise nothing.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        return SteadyLoader(
            blocks,
            collate_fn=self.collate,
            num_workers=self.config.num_workers,
            pin_memory=torch.cuda.is_available(),
            # Its own, since each iteration draws from it: a validation must not move the run's random numbers.
            generator=torch.Generator().manual_seed(self.seed),
            **workers,
            **batching,
        )


@dataclass(frozen=True)
class _WithEmpty:
    """Blocks, and under the number ``EMPTY`` one without labels."""

    blocks: Blocks

    def __getitem__(self, index: int) -> Block:
        if index != EMPTY:
            return self.blocks[index]
        first = self.blocks[0]
        return first._replace(labels=np.full_like(first.labels, IGNORED))


def collate(blocks: list[Block], isolate: bool = True, uniform: bool = False) -> dict[str, Tensor]:
    """Blocks as a batch. One of whole blocks has no ``documents`` unless ``uniform``: attention is faster unmasked."""
    inputs, labels, documents = (torch.from_numpy(np.stack(arrays)).long() for arrays in zip(*blocks, strict=True))
    batch = {"input_ids": inputs, "labels": labels}
    return batch | {"documents": documents} if isolate and (uniform or documents.any()) else batch


def tail_held_out(whole: Blocks, config: DataConfig) -> dict[str, Blocks]:
    """The blocks of a corpus of few documents, divided. Raises UserError where they are too few."""
    least, size = min_blocks(each := _each(config)), whole.block_size
    if len(whole) < least:
        raise UserError(
            f"--data-dir {config.named}: {whole.n_inputs} tokens are too few to learn from and to validate on, "
            f"which takes {least} blocks of --block-size {size}; {_more_text(whole.n_inputs, least - 1, size)}, or "
            "--held-out-share 0, which trains on all"
        )
    return {name: whole.select(numbers) for name, numbers in by_block(len(whole), each).items()}


def _each(config: DataConfig) -> float:
    """Share of the blocks that are held out for validation, and again for test."""
    return 0.1 if config.held_out_share is None else float(config.held_out_share) / 2


def _check_kinds(config: DataConfig, corpus: Corpus, splits: list[str]) -> None:
    """Refuse files to validate or test on that hold texts where conversations are trained on, or the other way."""
    numbers = np.array([split in ("", "train") for split in splits])
    learned = corpus.is_chat[numbers[corpus.sources]]
    for split, (flag, names) in config.files.items():
        of_split = np.array([split == name for name in splits])
        found = corpus.is_chat[of_split[corpus.sources]]
        if not len(found):
            raise UserError(f"{flag} {', '.join(names)}: holds no text; name another file, or leave it out")
        if len(learned) and (learned.all(), learned.any()) == (not found.any(), not found.all()):
            kinds = ("conversations", "texts") if found.all() else ("texts", "conversations")
            raise UserError(
                f"{flag} {', '.join(names)}: its records are {kinds[0]}, and those of --data-dir are {kinds[1]}; give "
                "records with the same fields, or name the field with --text-column"
            )


def _n_copies(blocks: Blocks) -> int:
    """Documents in blocks that say what another one there says."""
    assert isinstance(blocks.stream, Corpus)
    return blocks.n_documents - len(np.unique(blocks.stream.bare[blocks.seen]))


def read_in(epoch: int, division: Division, weights: list[float] | None) -> NDArray[np.int64]:
    """The documents that an epoch reads, by number, as often as their sources' weights say; all of them where they are
    divided by block."""
    parts, corpus = division.parts, division.corpus
    documents = np.arange(corpus.n_documents) if parts is None else parts["train"]
    return repeated(documents, corpus.sources, corpus.places, weights, epoch) if weights else documents


def blocks_of_epoch(
    epoch: int, *, division: Division, config: DataConfig, layout: Layout, padding: int, on_long: str
) -> Blocks:
    """The training blocks of an epoch that reads others than the one before."""
    corpus, documents = division.corpus, read_in(epoch, division, config.weights)
    blocks, _ = blocks_of(corpus, documents, layout, padding, config.block_size, on_long, corpus.names)
    return thinned(blocks, config.train_tokens)


def thinned(blocks: Blocks, tokens: int | None) -> Blocks:
    """As many blocks as hold about so many tokens, evenly spaced, so that they stand for the whole."""
    count = len(blocks) if tokens is None else max(1, tokens // blocks.block_size)
    if count >= len(blocks):
        return blocks
    every = len(blocks) // count
    return blocks.select(range(0, count * every, every))


def _more_text(n_tokens: int, n_blocks: int, block_size: int) -> str:
    """What to do about text that fills no more than so many blocks; a smaller block is the largest power of two."""
    most = (n_tokens - 1) // n_blocks
    smaller = f", or --block-size {1 << most.bit_length() - 1}" if most >= MIN_BLOCK else ""
    lacking = counted(n_blocks * block_size + 1 - n_tokens, "token")
    return f"add {lacking} of text or more{smaller}"
