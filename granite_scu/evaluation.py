"""Token-weighted bits per token: nats are summed, tokens counted, and one division made at the end."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from granite_scu.information import bits
from granite_scu.model.loss import IGNORED


@dataclass(frozen=True)
class Score:
    """Summed cross-entropy in nats and the supervised tokens it was summed over."""

    nats: float
    tokens: int

    @property
    def bits_per_token(self) -> float:
        """Mean cross-entropy in bits; raises ZeroDivisionError over no token."""
        return bits(self.nats / self.tokens)


@torch.no_grad()
def score(
    nats_of: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[dict[str, Tensor]],
    *,
    model: nn.Module,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    context: AbstractContextManager | None = None,
) -> Score:
    """Score batches in evaluation mode. The result depends on neither the batch size nor the padding.

    Args:
        nats_of: (input_ids, labels) -> summed cross-entropy in nats.
        batches: dicts of ``input_ids`` and already shifted ``labels``, (batch, time).
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
            labels = batch["labels"].to(device)
            nats = nats_of(batch["input_ids"].to(device), labels)
            sums += torch.stack([nats.double(), (labels != IGNORED).sum().double()])
    model.train(training)
    nats, tokens = reduce(sums).tolist()
    return Score(nats, int(tokens))
