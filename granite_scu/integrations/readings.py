"""What some laws ask for beside S: slopes of a held-out text, and the KL from the model as training began."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from granite_scu.control.laws.auto import WINDOW
from granite_scu.control.laws.base import Slopes
from granite_scu.integrations.adapter import Adapter
from granite_scu.integrations.loss_meter import LossMeter, counted, nats_and_tokens
from granite_scu.model.description_length import along_scale, bits
from granite_scu.model.kl_divergence import summed_kl_of
from granite_scu.model.modes import without_dropout

Reduce = Callable[[Tensor], Tensor]
"""Sums over all processes."""


class HeldOut:
    """The micro-batches of a held-out data set, of which each process has its part, in an order that is drawn once.

    Args:
        examples: tokenised, as those that are trained on.
        train_examples: say which columns the collator takes.
        collate: makes a batch of them.
        size: examples of a micro-batch in a process.
        process: number of this process, and of all.
        seed: of the order.

    Raises:
        ValueError: there are too few examples for one micro-batch.
    """

    def __init__(
        self, examples: Any, train_examples: Any, collate: Callable, size: int, process: tuple[int, int], seed: int
    ) -> None:
        self._examples, self._collate, self._size = examples, collate, size
        self._rank, self._world_size = process
        self._columns = set(train_examples[0])
        self._order = np.random.default_rng(seed).permutation(len(examples)).tolist()
        if not len(self):
            raise ValueError(
                f"held_out: has {len(examples)} examples, and a micro-batch of {size} in each of {process[1]} "
                "processes takes more; give more of them"
            )

    def __len__(self) -> int:
        return len(self._order) // (self._size * self._world_size)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        first = (number * self._world_size + self._rank) * self._size
        rows = [self._examples[index] for index in self._order[first : first + self._size]]
        return self._collate([{name: row[name] for name in row if name in self._columns} for row in rows])


class SlopeReader:
    """Reads the slopes at a tick, as ``training.slopes.SlopeSensor`` does in this application.

    It touches no ``.grad``, draws no random number and takes no training batch. The held-out micro-batches take turns.

    Args:
        model: what the trainer calls, unwrapped.
        adapter: of the model.
        held_out: the micro-batches.
        meter: of the training steps.
        reduce: sums over processes.
        state: of ``state`` before a checkpoint.
    """

    def __init__(
        self, model: nn.Module, adapter: Adapter, held_out: HeldOut, meter: LossMeter, reduce: Reduce, state: dict
    ) -> None:
        self._model, self._adapter, self._held_out = model, adapter, held_out
        self._meter, self._reduce = meter, reduce
        self._turn = state.get("turn", 0)
        self._base = {int(number): value for number, value in state.get("base", {}).items()}

    def state(self) -> dict[str, Any]:
        return {"turn": self._turn, "base": {str(number): value for number, value in self._base.items()}}

    def read(self, training_slope: float, scale: float) -> Slopes:
        """The slopes at a tick.

        Args:
            training_slope: of the steps since the last tick, bits per token.
            scale: a GradScaler's, or 1, over the micro-batches of a step: what training multiplies a loss by. In fp16
                gradients would vanish at less, and overflow at more.
        """
        number = self._turn % (1 << (min(len(self._held_out), WINDOW).bit_length() - 1))
        # How the trainer calls the model, as TRL's fused_lm_head=True; what belongs to a batch is no switch.
        switches = {name: value for name, value in self._meter.newest_inputs.items() if isinstance(value, bool)}
        batch = switches | _on(self._held_out[number], self._meter.newest.device)
        loss, slope = self._loss_and_slope(batch, scale)
        if number not in self._base:
            self._base[number] = self._loss_at_start(batch)
        newest = self._per_token(*self._meter.newest)
        slopes = Slopes(
            held_out=self._base[number] - loss,
            held_out_slope=-slope,
            training=self._loss_at_start(self._meter.newest_inputs) - newest,
            training_slope=training_slope,
        )
        self._turn += slopes.usable or math.isnan(self._base[number])
        return slopes

    def _loss_and_slope(self, batch: Mapping[str, Any], scale: float) -> tuple[float, float]:
        """The loss of a batch and its derivative by the scale of the update at 1, bits per token."""
        updates = self._adapter.updates()
        with self._meter.paused(), without_dropout(self._model), torch.enable_grad():
            output = self._model(**batch, **_no_cache(batch))
            nats, tokens = nats_and_tokens(batch, output)
            unit = tokens.clamp(min=1) / scale  # as of the loss that training takes the gradient of
            gradients = torch.autograd.grad(nats / unit, self._adapter.scaled)
        slope = along_scale([gradient.float() for gradient in gradients], updates) * unit
        return self._per_token(nats.detach(), tokens), self._per_token(slope, tokens)

    def _loss_at_start(self, batch: Mapping[str, Any]) -> float:
        """The loss of a batch without what training has added, bits per token."""
        with self._adapter.at_start(), _evaluating(self._model):
            return self._per_token(*nats_and_tokens(batch, self._model(**batch, **_no_cache(batch))))

    def _per_token(self, nats: Tensor, tokens: Tensor) -> float:
        return _per_token(self._reduce, nats, tokens)


def kl_from_start(model: nn.Module, adapter: Adapter, meter: LossMeter, reduce: Reduce) -> float:
    """KL(adapted || as training began) over the newest micro-batch of all processes, bits per supervised token.

    Two forward passes, whose logits are held at once. Synchronises with the device.
    """
    given = meter.newest_inputs
    left_out = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head")
    inputs = {name: value for name, value in given.items() if name not in left_out}
    mask = counted(given)
    with _evaluating(model):
        adapted = model(**inputs, **_no_cache(inputs)).logits[:, : mask.shape[1]][mask]
        with adapter.at_start():
            reference = model(**inputs, **_no_cache(inputs)).logits[:, : mask.shape[1]][mask]
    return _per_token(reduce, summed_kl_of(adapted, reference).double(), mask.sum().double())


def _per_token(reduce: Reduce, nats: Tensor, tokens: Tensor) -> float:
    """A sum over the micro-batches of all processes by supervised token, in bits; NaN where there is no such token."""
    total, count = reduce(torch.stack([nats, tokens])).tolist()
    return bits(total / count) if count else math.nan


def _on(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _no_cache(inputs: Mapping[str, Any]) -> dict[str, bool]:
    """Keeps a model in evaluation mode from filling a cache for generation."""
    return {} if "use_cache" in inputs else {"use_cache": False}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode and without gradients inside, and back in the mode it was in outside."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
