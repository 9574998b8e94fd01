"""Bits of each document apart."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from granite_scu.config.settings import IGNORED
from granite_scu.data.blocks.packing import Blocks
from granite_scu.data.datamodule import collate
from granite_scu.evaluation.score import each_batch


@dataclass(frozen=True, eq=False)
class DocumentScores:
    """Summed cross-entropy in nats and supervised tokens of each document, (documents,) each.

    A document without a supervised token among the blocks has 0 and 0.
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]


def score_documents(
    nats_of: Callable[..., Tensor],
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
        model: as of ``each_batch``.
        context: as of ``each_batch``.
    """
    n_documents = len(blocks.stream.ends)
    nats, tokens = np.zeros(n_documents), np.zeros(n_documents, np.int64)
    groups = [range(len(blocks))[start : start + batch_size] for start in range(0, len(blocks), batch_size)]
    batches = (collate([blocks[i] for i in numbers], isolate=False) for numbers in groups)
    scored = each_batch(nats_of, batches, model=model, context=context)
    for (batch, each), numbers in zip(scored, groups, strict=True):
        counted = (batch["labels"] != IGNORED).cpu().numpy()
        owners = np.stack([blocks.documents(i) for i in numbers])[counted]
        nats += np.bincount(owners, each.double().cpu().numpy()[counted], n_documents)
        tokens += np.bincount(owners, minlength=n_documents)
    return DocumentScores(nats, tokens)
