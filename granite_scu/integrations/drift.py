"""What ``max_drift`` holds in a trainer of others: drift on general text, which is made ready as training begins."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, reduce
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainingArguments

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig, DriftConfig
from granite_scu.control import Measurement
from granite_scu.evaluation import general_text, general_writing
from granite_scu.evaluation.general_text import GeneralText, anchor_batches, batches
from granite_scu.integrations.adapter import Adapter
from granite_scu.integrations.loss_meter import LossMeter
from granite_scu.model import base_digest
from granite_scu.model.drift import (
    READ_AT_ONCE,
    Drift,
    GeneralPart,
    Trained,
    Turns,
    anchor_tokens,
    check_noise,
    steering_tokens,
)
from granite_scu.model.modes import evaluation_mode

USUAL_TOKENS = 4096
"""What a sum of nats on general text is divided by before its gradient is taken: it is near a mean, as fp16 wants."""

LOOKED_AT = 64
"""Examples by which the length of all is judged."""


class HeldDrift:
    """Drift of a trainer's model: what anchors it, what the loop reads, and what it never sees.

    Args:
        model: that is trained.
        text: general text.
        padding: token id.
        tokens_per_step: positions that an optimizer step trains on.
        every: optimizer steps between ticks.
        budget: the largest share of drift.
        state: of ``state`` before a checkpoint; None where training begins.
    """

    def __init__(
        self,
        model: Trained,
        text: GeneralText,
        padding: int,
        tokens_per_step: int,
        every: int,
        budget: float,
        state: dict | None = None,
    ) -> None:
        parts, read = text.parts(), steering_tokens(tokens_per_step * every)
        self._held_out = GeneralPart(model, batches(parts.held_out, READ_AT_ONCE, padding))
        self._steering = GeneralPart(model, batches(parts.steering, read, padding))
        anchor = GeneralPart(model, anchor_batches(parts.anchor, anchor_tokens(tokens_per_step), padding))
        self.gradient: Callable[[int], list[Tensor]] = anchor.gradient
        self._turns = Turns()
        if state:
            self._turns.load_state_dict(state)
        else:
            check_noise(self._steering, budget)

    def measurement(self, of_s: Measurement) -> Measurement:
        """What the law sees in the place of a tick's measurement of S."""
        return self._steering.follow(self._turns).measurement(of_s)

    def held_out(self) -> Drift:
        """Drift of the model as it is now, on what the loop never sees. Every process calls this."""
        return self._held_out.read()

    def state(self) -> dict[str, Any]:
        return self._turns.state_dict()


def obtain(
    asked: DriftConfig, model: Trained, tokenizer: PreTrainedTokenizerBase, seed: int, base: str, first: bool
) -> GeneralText:
    """General text, the same in each process: the user's files, or what the base model writes.

    Args:
        asked: which.
        model: as training begins.
        tokenizer: of the model.
        seed: of the draws.
        base: where the weights are from, under which what they write is kept; empty where nobody knows.
        first: whether this process is the one that reads and writes.

    Raises:
        UserError: there is none to be had.
    """
    found: GeneralText | UserError | None = None
    if first:
        try:
            with model.as_it_began(), model.precision(), evaluation_mode(model.language_model):
                found = _find(asked, model, tokenizer, seed, base)
        except UserError as error:  # the other processes wait to be told
            found = error
    [found] = broadcast_object_list([found])
    if not isinstance(found, GeneralText):
        raise found or UserError("the first process has no general text")
    return found


def _find(asked: DriftConfig, model: Trained, tokenizer: PreTrainedTokenizerBase, seed: int, base: str) -> GeneralText:
    if files := asked.general_files:
        rows = len(model.language_model.get_input_embeddings().weight)
        return general_text.of_files(files, DataConfig(), tokenizer, asked.general_tokens, seed, rows=rows)
    weights = base_digest.record(base) if base else None
    console = Console(stderr=True)
    return general_writing.general_text(model.language_model, tokenizer, asked.general_tokens, seed, console, weights)


def trained_by(
    args: TrainingArguments, model: nn.Module, adapter: Adapter, meter: LossMeter, optimizer: Any
) -> Trained:
    """The trainer's model as what general text is read with, in the trainer's precision."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)

    @contextmanager
    def precision() -> Iterator[None]:
        with meter.paused(), torch.autocast(args.device.type, dtype, enabled=dtype is not None):
            yield

    def unit() -> Tensor:  # what training multiplies a loss by, and a mean's tokens, about
        scaler = getattr(optimizer, "scaler", None)
        scale = scaler.get_scale() if scaler else 1.0
        return torch.full((), scale / (args.gradient_accumulation_steps * USUAL_TOKENS), device=args.device)

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    process = args.process_index, args.world_size
    return Trained(base, adapter.trained, adapter.at_start, precision, partial(reduce, reduction="sum"), process, unit)


def tokens_per_step(loader: DataLoader, args: TrainingArguments) -> int:
    """Positions of an optimizer step on all processes, by some examples; 0 of a stream, which cannot be looked into."""
    if not hasattr(loader.dataset, "__len__"):
        return 0
    data = loader.dataset
    some = range(0, len(data), -(-len(data) // LOOKED_AT))
    widths = [loader.collate_fn([data[index]])["input_ids"].numel() - 1 for index in some]
    examples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return examples * sum(widths) // len(widths)
