"""What the adapter saves on held-out and on training text at a tick, and how that changes with the adapter's size.

Scale the adapter's update by x, and let V(x) be the bits per token that it saves over the model as training began. The
slope V'(1) takes no second scale: it is minus the sum of <gradient, parameter> over the factors that x scales.
"""

import math
from typing import Any

import torch
from torch import Tensor

from granite_scu.config.settings import IGNORED
from granite_scu.control.laws.auto import WINDOW
from granite_scu.control.laws.base import Slopes
from granite_scu.data.datamodule import TextDataModule
from granite_scu.model.description_length import along_scale, bits, scaled_factors
from granite_scu.model.modes import evaluation_mode, without_dropout
from granite_scu.training.module import LOSS_UNIT, GraniteModule, Window

Batch = dict[str, Tensor]


class SlopeSensor:
    """Reads the slopes at a tick, on one held-out micro-batch and on the steps since the last tick.

    It leaves the run as it is: it touches no ``.grad``, draws no random number and takes no training batch. Each rank
    has a held-out micro-batch of its own; the sums over ranks are the same on each to the bit.

    The held-out micro-batches take turns: as many as the validation text fills, a power of two and at most ``WINDOW``,
    so that each window of the law has all of them equally often. A reading that is not finite, which the law leaves
    out, leaves the turn where it is; otherwise the law would compare one micro-batch with another.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._base: dict[int, float] = {}  # of each held-out micro-batch, which never changes

    def read(self, data: TextDataModule, module: GraniteModule, window: Window) -> Slopes:
        """The slopes at a tick.

        Args:
            data: of the run.
            module: the model as it is now.
            window: the steps since the last tick.
        """
        slopes = self._read(data, module, window)
        supervised = not math.isnan(self._base[self._number(data)])  # without a label it would never be finite
        self._turn += slopes.usable or not supervised
        return slopes

    def _number(self, data: TextDataModule) -> int:
        """Of the held-out micro-batch whose turn it is."""
        return self._turn % micro_batches_read(data.n_held_out)

    def _read(self, data: TextDataModule, module: GraniteModule, window: Window) -> Slopes:
        number = self._number(data)
        batch = module.trainer.strategy.batch_to_device(data.held_out(number))
        loss, slope = _loss_and_slope(module, batch)
        if number not in self._base:
            self._base[number] = _loss_at_start(module, batch)
        return Slopes(
            held_out=self._base[number] - loss,
            held_out_slope=-slope,
            training=_loss_at_start(module, module.newest_batch()) - _newest_loss(module),
            training_slope=math.nan if window.slope is None else window.slope,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self._turn, "base": dict(self._base)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._turn, self._base = state["turn"], dict(state["base"])


def micro_batches_read(there: int) -> int:
    """How many held-out micro-batches take turns, of those that the validation text fills."""
    return 1 << (min(there, WINDOW).bit_length() - 1)


def _loss_and_slope(module: GraniteModule, batch: Batch) -> tuple[float, float]:
    """The loss of a batch over all ranks and its derivative by the scale of the update, at 1; bits per token.

    In training mode, as gradient checkpointing and the training kernels work in no other, but without dropout.
    """
    updates = list(module.updates.values())
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    # As in training: fp16's gradients vanish without the scale, and overflow at one that accumulation has let grow.
    unit = LOSS_UNIT * module.trainer.accumulate_grad_batches / (scaler.get_scale() if scaler else 1.0)
    with without_dropout(module.model), torch.enable_grad(), module.trainer.precision_plugin.forward_context():
        nats = module(**batch)
        gradients = torch.autograd.grad(nats / unit, scaled_factors(updates))
    slope = along_scale(gradients, updates) * unit
    return _per_token(module, nats.detach(), batch), _per_token(module, slope, batch)


def _loss_at_start(module: GraniteModule, batch: Batch) -> float:
    """The loss of a batch over all ranks without what training has added; bits per token."""
    as_it_began = module.at_start if module.start else module.model.disable_adapter
    context = module.trainer.precision_plugin.forward_context()
    with as_it_began(), torch.no_grad(), context, evaluation_mode(module.model):
        return _per_token(module, module(**batch), batch)


def _newest_loss(module: GraniteModule) -> float:
    """The loss of the newest training micro-batch, of before its step; bits per token."""
    count = float(module.reduced(_supervised(module.newest_batch())))
    return bits(module.newest_nats() / count) if count else math.nan


def _per_token(module: GraniteModule, nats: Tensor, batch: Batch) -> float:
    """A sum over a batch, over all ranks, by supervised token and in bits; NaN where there is no such token."""
    total, count = module.reduced(torch.stack([nats.double(), _supervised(batch)])).tolist()
    return bits(total / count) if count else math.nan


def _supervised(batch: Batch) -> Tensor:
    return (batch["labels"] != IGNORED).sum().double()
