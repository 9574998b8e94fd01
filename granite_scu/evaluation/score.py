"""Token-weighted bits per token: nats are summed, tokens counted, and one division made at the end."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from granite_scu.config.settings import IGNORED, BaseConfig
from granite_scu.hardware.machine import Machine
from granite_scu.model.adapters import load_adapted
from granite_scu.model.description_length import bits
from granite_scu.model.loading import WEIGHT_DTYPES, announce_kernels, autocast
from granite_scu.model.loss import summed_nats

_MULTIPLE = 16


def padded_length(longest: int) -> int:
    """Tokens that the rows of a batch are padded to, the longest having so many: a multiple of 16, so that kernels are
    compiled for few lengths and a convolution is never wider than its input."""
    return -(-longest // _MULTIPLE) * _MULTIPLE


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


def score_split(folder: Path, base: BaseConfig, machine: Machine, loader: Iterable[dict], split: str) -> dict:
    """Score all of a split.

    Args:
        folder: of the run, with its adapter.
        base: the model.
        machine: what it is scored on.
        loader: batches of the split.
        split: its name.

    Raises:
        UserError: the adapter does not fit the base model.
    """
    label, device = f"--run.output_dir {folder}", machine.torch_device
    base = replace(base, kernels=machine.kernels)
    dtype = WEIGHT_DTYPES[machine.precision]
    model, switches = load_adapted(base, {label: folder}, dtype, device, machine.attention)
    announce_kernels(model)
    found = []
    for switch in switches:
        with switch():
            context = autocast(device, machine.precision)
            found.append(score(partial(summed_nats, model), loader, model=model, context=context))
    of_base, of_adapter = found
    return {
        "split": split,
        "tokens": of_adapter.tokens,
        "base_bpt": of_base.bits_per_token,
        "adapter_bpt": of_adapter.bits_per_token,
    }
