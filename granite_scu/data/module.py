"""The data of a run, as Lightning wants it: read, split, packed, and served in batches."""

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from granite_scu.config import DataConfig
from granite_scu.data.division import divide
from granite_scu.data.packing import Blocks, pack
from granite_scu.data.sampling import EndlessBatches
from granite_scu.data.splits import MIN_BLOCKS, Split, by_block
from granite_scu.errors import UserError

_SMALLEST_BLOCK = 8  # the least that DataConfig accepts


class TextDataModule(LightningDataModule):
    """Training, validation and test blocks of one corpus.

    A batch is a dict of ``input_ids`` and ``labels``, both (B, block_size) int64; labels are shifted already.
    The Trainer needs ``use_distributed_sampler=False``: the loaders share the blocks out between ranks.

    Args:
        config: the text and how it is cut.
        seed: of the order of training blocks. The split does not depend on it.

    Attributes:
        start_batch: micro-batches that each rank has trained on already; training goes on after them.
        record: of the documents of each split, see ``Division.record``.
    """

    def __init__(self, config: DataConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.seed = seed
        self.start_batch = 0
        self._blocks: Split[Blocks] | None = None
        self._split_by = ""
        self._n_empty = 0
        self.record: dict[str, Any] = {}

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read, split and tokenise the corpus. Once on every rank, before anything else here is used.

        Not Lightning's ``prepare_data``: N, the number of tokens, is wanted before there is a Trainer.

        Raises:
            UserError: nothing to read, a file that cannot be read, or too little text for the block size.
        """
        config = self.config
        first_rank = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        packed = partial(pack, tokenizer=tokenizer, block_size=config.block_size, show_progress=first_rank)
        division = divide(config)
        self._split_by, self._n_empty, self.record = division.by, division.n_empty, division.record()
        parts = division.parts
        blocks = parts.map(packed) if parts else tail_held_out(packed(division.documents), config)
        if blocks.train.n_inputs <= config.block_size:  # each needs the token after it as its label
            raise UserError(
                f"--data-dir {config.named}: the training split has {blocks.train.n_inputs} tokens, too few for one "
                f"block of --block-size {config.block_size}; {_more_text(blocks.train.n_inputs, n_blocks=1)}"
            )
        blocks = replace(blocks, train=thinned(blocks.train, config.train_tokens))
        assert all(part.n_supervised for part in (blocks.train, blocks.validation, blocks.test))
        self._blocks = blocks

    def check_processes(self, count: int) -> None:
        """Refuse more processes than there are validation or test blocks.

        Lightning skips evaluation on a rank without a block, and the others wait for it without end.

        Raises:
            UserError: a process would have nothing to evaluate on.
        """
        name, blocks = min((("validation", self.validation), ("test", self.test)), key=lambda named: named[1].n_blocks)
        if blocks.n_blocks < count:
            raise UserError(
                f"--multi-gpu: {count} processes need a {name} block each, and the text makes {blocks.n_blocks} of "
                f"--block-size {self.config.block_size}; start no more processes than that, or "
                f"{_more_text(blocks.n_inputs, count)}"
            )

    @property
    def train(self) -> Blocks:
        return self._prepared.train

    @property
    def validation(self) -> Blocks:
        return self._prepared.validation

    @property
    def test(self) -> Blocks:
        return self._prepared.test

    @property
    def n_tokens(self) -> int:
        """N: supervised tokens of the training split, over all ranks."""
        return self.train.n_supervised

    @property
    def checksum(self) -> str:
        """Of the blocks trained on and validated on."""
        return f"{self.train.checksum()}-{self.validation.checksum()}"

    def steps_per_epoch(self, global_batch_blocks: int) -> float:
        """Optimizer steps in a pass over the training blocks, ``global_batch_blocks`` of them in a step."""
        return self.train.n_blocks / global_batch_blocks

    def summary(self) -> dict[str, Any]:
        """Counts for the log and the run folder: how it was split, what was left out, and each split's size."""
        blocks = self._prepared
        parts = {"train": blocks.train, "validation": blocks.validation, "test": blocks.test}
        return {
            "path": self.config.named,
            "split_by": self._split_by,
            "block_size": self.config.block_size,
            "empty_documents": self._n_empty,
            "gap_blocks": 2 if self._split_by == "block" else 0,
            **{
                name: {
                    "documents": part.n_documents,
                    "blocks": part.n_blocks,
                    "supervised_tokens": part.n_supervised,
                    "bytes": part.n_bytes,
                }
                for name, part in parts.items()
            },
        }

    def train_dataloader(self) -> DataLoader:
        """Batches without end, reshuffled every epoch."""
        return self._loader(*self._training_order(self.start_batch))

    def upcoming(self, start: int, count: int) -> list[dict[str, Tensor]]:
        """The rank's training batches ``start`` to ``start + count - 1``, read apart from the loader's."""
        blocks, batches = self._training_order(start)
        return [_collate([blocks[index] for index in batch]) for batch in islice(batches, count)]

    def val_dataloader(self) -> DataLoader:
        """The validation blocks in order, shared out between ranks: rank r has blocks r, r + W, r + 2 W, ..."""
        return self._loader(self.validation, self._in_order(self.validation))

    def test_dataloader(self) -> DataLoader:
        """The test blocks in order, shared out as in validation."""
        return self._loader(self.test, self._in_order(self.test))

    @property
    def _prepared(self) -> Split[Blocks]:
        assert self._blocks is not None, "prepare() comes first"
        return self._blocks

    def _training_order(self, start: int) -> tuple[Blocks, Iterable[list[int]]]:
        """What is trained on, and the numbers of its blocks, batch by batch from ``start`` on."""
        rank, world_size = self._rank_and_world_size()
        return self.train, EndlessBatches(
            len(self.train), self.config.batch_size, self.seed, rank, world_size, start=start
        )

    def _rank_and_world_size(self) -> tuple[int, int]:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        self.check_processes(world_size)  # before training too: the test blocks are read at its very end
        return rank, world_size

    def _in_order(self, blocks: Blocks) -> list[list[int]]:
        rank, world_size = self._rank_and_world_size()
        mine = list(range(rank, len(blocks), world_size))
        size = self.config.eval_batch_size or self.config.batch_size
        return [mine[i : i + size] for i in range(0, len(mine), size)]

    def _loader(self, blocks: Blocks, batches: Iterable[list[int]]) -> DataLoader:
        workers: dict[str, Any] = {}
        if self.config.num_workers:
            workers = {"prefetch_factor": self.config.prefetch_factor, "persistent_workers": True}
            # Silences a warning that tokenizers print in every forked worker; ours tokenise nothing.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        return DataLoader(
            blocks,  # type: ignore[arg-type]  # a map-style data set without torch's base class
            batch_sampler=batches,  # type: ignore[arg-type]
            collate_fn=_collate,
            num_workers=self.config.num_workers,
            pin_memory=torch.cuda.is_available(),
            # Its own, since each iteration draws from it: a validation must not move the run's random numbers.
            generator=torch.Generator().manual_seed(self.seed),
            **workers,
        )


def _collate(blocks: list[tuple[NDArray[np.int32], NDArray[np.int32]]]) -> dict[str, Tensor]:
    inputs, labels = (torch.from_numpy(np.stack(arrays)).long() for arrays in zip(*blocks, strict=True))
    return {"input_ids": inputs, "labels": labels}


def tail_held_out(whole: Blocks, config: DataConfig) -> Split[Blocks]:
    """The blocks of a corpus of few documents, divided. Raises UserError where they are too few."""
    if len(whole) < MIN_BLOCKS:
        size = config.block_size
        raise UserError(
            f"--data-dir {config.named}: {whole.n_inputs} tokens are too few to hold some out for validation, "
            f"which takes {MIN_BLOCKS} blocks of --block-size {size}, {MIN_BLOCKS * size} tokens; "
            f"{_more_text(whole.n_inputs, MIN_BLOCKS)}"
        )
    return by_block(len(whole)).map(whole.part)


def thinned(blocks: Blocks, tokens: int | None) -> Blocks:
    """As many blocks as hold about so many tokens, evenly spaced, so that they stand for the whole."""
    count = len(blocks) if tokens is None else max(1, tokens // blocks.block_size)
    return (
        blocks if count >= len(blocks) else blocks.part(range(0, count * (len(blocks) // count), len(blocks) // count))
    )


def _more_text(n_tokens: int, n_blocks: int) -> str:
    """What to do about too little text: the largest power of two that makes enough blocks, where there is one."""
    size = (n_tokens - 1) // n_blocks
    return (
        f"give more text, or --block-size {1 << size.bit_length() - 1}" if size >= _SMALLEST_BLOCK else "give more text"
    )
