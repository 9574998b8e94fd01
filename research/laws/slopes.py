"""What the adapter saves on held-out text at a tick, and how that changes with the adapter's size.

Scale the adapter's update by x, and let V(x) be the bits per token that it saves over the model as training began. The
slope V'(1) takes no second scale: it is minus the sum of <gradient, parameter> over the factors that x scales.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from granite_scu.model.compilation import evaluation_mode, without_dropout
from granite_scu.model.description_length import LowRankUpdate
from granite_scu.model.plant import LOSS_UNIT
from granite_scu.training.module import GraniteModule, supervised
from research.laws.auto import WINDOW
from research.laws.readings import per_token

Batch = Mapping[str, Tensor]


class SlopeSensor:
    """Reads V(1) and V'(1) at a tick, on one held-out micro-batch: a forward and a backward pass, and once for each
    micro-batch another forward pass.

    It leaves the run as it is: it touches no ``.grad``, draws no random number and takes no training batch. The
    held-out micro-batches take turns: as many as the text fills, a power of two and at most ``WINDOW``, so that each
    window of the law has all of them equally often. A reading that is not finite, which the law leaves out, leaves the
    turn where it is; otherwise the law would compare one micro-batch with another.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._base: dict[int, float] = {}  # of each held-out micro-batch, which never changes

    def read(self, module: GraniteModule) -> dict[str, float]:
        """``savings_held_out`` and ``savings_held_out_slope``, bits per token."""
        number = self._turn % micro_batches_read(n_held_out(module))
        batch = held_out(module, number)
        loss, slope = loss_and_slope(module, batch)
        if number not in self._base:
            self._base[number] = loss_at_start(module, batch)
        saved = self._base[number] - loss
        usable = math.isfinite(saved) and math.isfinite(slope)
        self._turn += usable or math.isnan(self._base[number])  # without a label it would never be finite
        return {"savings_held_out": saved, "savings_held_out_slope": -slope}

    def state(self) -> dict[str, Any]:
        return {"turn": self._turn, "base": dict(self._base)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._turn = state["turn"]
        self._base = {int(number): bits for number, bits in state["base"].items()}  # JSON has no keys but texts


def micro_batches_read(there: int) -> int:
    """How many held-out micro-batches take turns, of those that the held-out text fills.

    >>> [micro_batches_read(there) for there in (1, 3, 1000)]
    [1, 2, 8]
    """
    return 1 << (min(there, WINDOW).bit_length() - 1)


def n_held_out(module: GraniteModule) -> int:
    """Micro-batches of validation blocks, on all ranks together: at least one."""
    return len(module.trainer.datamodule.validation) // (_size(module) * module.process[1])


def held_out(module: GraniteModule, number: int) -> Batch:
    """The rank's part of one of the ``n_held_out`` micro-batches. The seed shuffles the validation blocks, once.

    It has as many blocks as a micro-batch of training, or fewer where the ranks have fewer each.
    """
    (rank, world_size), data, size = module.process, module.trainer.datamodule, _size(module)
    first = (number * world_size + rank) * size
    order = np.random.default_rng(data.seed).permutation(len(data.validation))
    batch = data.collate([data.validation[index] for index in order[first:][:size].tolist()])
    return module.trainer.strategy.batch_to_device(batch)


def _size(module: GraniteModule) -> int:
    data = module.trainer.datamodule
    return min(data.config.batch_size, len(data.validation) // module.process[1])


def loss_and_slope(module: GraniteModule, batch: Batch) -> tuple[float, float]:
    """The loss of a batch over all processes and its derivative by the scale of the update, at 1; bits per token.

    In training mode, as gradient checkpointing and the training kernels work in no other, but without dropout.
    """
    updates = module.layer_updates
    scaled = module.factors if updates[0].origin else module.factors[1::2]
    with module.precision(), without_dropout(module.model), torch.enable_grad():
        nats = module(**batch)
        unit = LOSS_UNIT * module.accumulated / (module.scaler.get_scale() if module.scaler else 1.0)
        gradients = torch.autograd.grad(nats / unit, scaled)
    slope = along_scale(gradients, updates) * unit
    return per_token(module, nats.detach(), supervised(batch)), per_token(module, slope, supervised(batch))


def loss_at_start(module: GraniteModule, batch: Batch) -> float:
    """The loss of a batch over all processes without what training has added; bits per token."""
    with module.as_it_began(), torch.no_grad(), module.precision(), evaluation_mode(module.model):
        return per_token(module, module(**batch), supervised(batch))


def along_scale(gradients: Sequence[Tensor], updates: Sequence[LowRankUpdate]) -> Tensor:
    """dL/dx at x = 1, L a loss of the model with its update scaled by x: a scalar in fp64, in the loss's unit.

        sum_i <dL/dB_i, B_i>        or, from an adapter,        sum_i <dL/dA_i, A_i - A_0i> + <dL/dB_i, B_i - B_0i>

    Scaled by x, an update s B A is s (x B) A. One that started from an adapter is scaled along the straight line that
    leads from (A_0, B_0) at x = 0 to (A, B) at x = 1.

    Args:
        gradients: of L by every B, and where training started from an adapter by every A before it.
        updates: the adapted layers.
    """
    moved = [part for u in updates for part in _way(u)]
    return (_flat(gradients) * _flat(moved)).sum(dtype=torch.float64)


def _way(update: LowRankUpdate) -> tuple[Tensor, ...]:
    """What the scaled factors have come from x = 0."""
    a, b = update.a.detach(), update.b.detach()
    return (b,) if update.origin is None else (a - update.origin[0], b - update.origin[1])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
