"""Token-weighted bits per token: nats are summed, tokens counted, and one division made at the end."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from granite_scu.config.settings import IGNORED
from granite_scu.data.blocks.packing import Blocks
from granite_scu.data.datamodule import collate
from granite_scu.model.adapters import Switch
from granite_scu.model.description_length import bits
from granite_scu.model.loss import summed_nats


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


@torch.no_grad()
def each_batch(
    nats_of: Callable[..., Tensor],
    batches: Iterable[dict[str, Tensor]],
    *,
    model: nn.Module,
    context: AbstractContextManager | None = None,
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Each batch, on the device, and its nats, in evaluation mode. To be read to its end.

    Args:
        nats_of: called with what a batch has -> cross-entropy in nats.
        batches: dicts of ``input_ids``, already shifted ``labels`` and, where they are kept apart, ``documents``,
            (batch, time) each.
        model: put into evaluation mode meanwhile; its parameters' device takes the batches.
        context: autocast, say.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    with context or nullcontext():
        for batch in batches:
            on_device = {name: part.to(device) for name, part in batch.items()}
            yield on_device, nats_of(**on_device)
    model.train(training)


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
        batches: as of ``each_batch``, and so ``model`` and ``context``.
        model: put into evaluation mode meanwhile.
        reduce: sums a (2,) tensor over ranks.
        context: autocast, say.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for batch, nats in each_batch(nats_of, batches, model=model, context=context):
        sums += torch.stack([nats.double(), (batch["labels"] != IGNORED).sum().double()])
    total, tokens = reduce(sums).tolist()
    return Score(total, int(tokens))


def score_each(
    model: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    switches: Sequence[Switch] = (nullcontext,),
    context: AbstractContextManager | None = None,
) -> list[Score]:
    """Score the same batches with a model as each of the things that it can be switched to; arguments as ``score``."""
    found = []
    for switch in switches:
        with switch():
            found.append(score(partial(summed_nats, model), batches, model=model, context=context))
    return found
