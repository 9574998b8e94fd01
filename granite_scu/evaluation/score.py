"""Token-weighted bits per token: nats are summed, tokens counted, and one division made at the end."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from granite_scu.config.settings import IGNORED
from granite_scu.data.blocks.packing import Blocks
from granite_scu.model.description_length import bits


@dataclass(frozen=True)
class Score:
    """Summed cross-entropy in nats and the supervised tokens it was summed over."""

    nats: float
    tokens: int

    @property
    def bits_per_token(self) -> float:
        """Mean cross-entropy in bits; raises ZeroDivisionError over no token."""
        return bits(self.nats / self.tokens)


@dataclass(frozen=True, eq=False)
class DocumentScores:
    """Summed cross-entropy in nats and supervised tokens of each document, (documents,) each.

    A document without a supervised token among the blocks has 0 and 0.
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @property
    def total(self) -> Score:
        return Score(float(self.nats.sum()), int(self.tokens.sum()))


@torch.no_grad()
def score_documents(
    nats_of: Callable[[Tensor, Tensor], Tensor],
    blocks: Blocks,
    batch_size: int,
    *,
    model: nn.Module,
    context: AbstractContextManager | None = None,
) -> DocumentScores:
    """Score blocks in evaluation mode, on one device, each document apart.

    Args:
        nats_of: (input_ids, labels) -> cross-entropy in nats of each position, (batch, time), 0 where not counted.
        blocks: of one stream; a document's tokens may lie in several blocks, and a block may hold several documents.
        batch_size: blocks at a time; the result does not depend on it.
        model: put into evaluation mode meanwhile; its parameters' device takes the batches.
        context: autocast, say.
    """
    device = next(model.parameters()).device
    n_documents = len(blocks.stream.ends)
    nats, tokens = np.zeros(n_documents), np.zeros(n_documents, np.int64)
    training = model.training
    model.eval()
    with context or nullcontext():
        for start in range(0, len(blocks), batch_size):
            numbers = range(start, min(start + batch_size, len(blocks)))
            inputs, labels, _ = (np.stack(arrays) for arrays in zip(*(blocks[i] for i in numbers), strict=True))
            ids, targets = (torch.from_numpy(array).long().to(device) for array in (inputs, labels))
            each = nats_of(ids, targets).double().cpu().numpy()
            counted = labels != IGNORED
            owners = np.stack([blocks.documents(i) for i in numbers])[counted]
            nats += np.bincount(owners, each[counted], n_documents)
            tokens += np.bincount(owners, minlength=n_documents)
    model.train(training)
    return DocumentScores(nats, tokens)


@torch.no_grad()
def score(
    nats_of: Callable[..., Tensor],
    batches: Iterable[dict[str, Tensor]],
    *,
    model: nn.Module,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    context: AbstractContextManager | None = None,
) -> Score:
    """Score batches in evaluation mode. The result depends on neither the batch size nor the padding.

    Args:
        nats_of: called with what a batch has -> summed cross-entropy in nats.
        batches: dicts of ``input_ids``, already shifted ``labels`` and, where they are kept apart, ``documents``,
            (batch, time) each.
        model: put into evaluation mode meanwhile; its parameters' device takes the batches.
        reduce: sums a (2,) tensor over ranks.
        context: autocast, say.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    with context or nullcontext():
        for batch in batches:
            on_device = {name: part.to(device) for name, part in batch.items()}
            nats = nats_of(**on_device)
            sums += torch.stack([nats.double(), (on_device["labels"] != IGNORED).sum().double()])
    model.train(training)
    nats, tokens = reduce(sums).tolist()
    return Score(nats, int(tokens))
