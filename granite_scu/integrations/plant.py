"""What the control loop controls in a trainer of transformers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import gather, reduce
from torch import Tensor, nn
from transformers import TrainingArguments

from granite_scu.config.settings import ControlConfig
from granite_scu.integrations.adapter import Adapter
from granite_scu.integrations.loss_meter import LossMeter, counted, nats_and_tokens
from granite_scu.model.compilation import evaluation_mode
from granite_scu.model.description_length import LowRankUpdate
from granite_scu.model.kl_divergence import summed_kl_of
from granite_scu.model.plant import AdapterPlant


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


class TrainerPlant(AdapterPlant):
    """A PEFT model that a ``Trainer`` trains.

    Args:
        model: what the trainer calls, before it is wrapped for several processes.
        adapter: its LoRA adapter.
        args: of the trainer.
        optimizer: of the trainer, as accelerate wraps it.
        config: through which actuator lambda acts, and by what measure S is read.
        held_out: texts for a law that asks for slopes; None for others.
        prior_sigma, n_tokens, gradient_clip, total_steps: as of ``AdapterPlant``.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: Adapter,
        args: TrainingArguments,
        optimizer: Any,
        config: ControlConfig,
        held_out: HeldOut | None,
        *,
        prior_sigma: float,
        n_tokens: int,
        gradient_clip: float,
        total_steps: int,
    ) -> None:
        acting = config.measure, config.actuator, held_out is not None
        super().__init__(prior_sigma, n_tokens, total_steps, gradient_clip, *acting, args.device)
        self.model, self.adapter, self.meter = model, adapter, LossMeter(model, args.device)
        self.scaler, self._held_out = getattr(optimizer, "scaler", None), held_out
        self.accumulated, self._device = args.gradient_accumulation_steps, args.device
        self.process = args.process_index, args.world_size

    @property
    def factors(self) -> Sequence[Tensor]:
        return self.adapter.factors

    @property
    def layer_updates(self) -> list[LowRankUpdate]:
        return self.adapter.updates()

    def reduced(self, sums: Tensor) -> Tensor:
        return gather(sums[None]).sum(0)

    def summed(self, tensor: Tensor) -> Tensor:
        return reduce(tensor, reduction="sum")

    def cost(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return nats_and_tokens(batch, self.model(**batch, **_no_cache(batch)))

    def loss_unit(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(min=1) / ((self.scaler.get_scale() if self.scaler else 1.0) / self.accumulated)

    @contextmanager
    def precision(self) -> Iterator[None]:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)
        with self.meter.paused(), torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            yield

    def as_it_began(self) -> AbstractContextManager[None]:
        return self.at(self.adapter.origin or [torch.zeros_like(factor) for factor in self.factors])

    def prepare_gradient(self, optimizer: AcceleratedOptimizer, step: int) -> None:
        """Before each optimizer step; the trainer has averaged over the supervised tokens of it on all processes, and
        unscaled. A GradScaler has looked for what is not finite before the penalty was added."""
        for factor in self.factors:
            if factor.requires_grad and factor.grad is None:  # of a layer that took no part in the step
                factor.grad = torch.zeros_like(factor)
        nats, tokens = self.reduced(self.meter.take())
        self.regularise(nats, tokens, optimizer.param_groups[0]["lr"], step)
        self.skip_unless_finite(optimizer.optimizer)

    def finish_step(self, skipped: bool) -> None:
        """After each optimizer step; ``skipped`` where accelerate says that a GradScaler left it out.

        It says nothing of a fused optimizer, which is called all the same and leaves the step out by itself.
        """
        self.count_step(skipped)
        self.act_on_update()

    @property
    def n_held_out(self) -> int:
        return len(self._held_out or ())

    def held_out(self, number: int) -> dict[str, Any]:
        assert self._held_out
        # How the trainer calls the model, as TRL's fused_lm_head=True; what belongs to a batch is no switch.
        switches = {name: value for name, value in self.meter.newest_inputs.items() if isinstance(value, bool)}
        batch = self._held_out[number]
        on_device = {name: v.to(self._device) if isinstance(v, Tensor) else v for name, v in batch.items()}
        return switches | on_device

    def newest_batch(self) -> Mapping[str, Any]:
        return self.meter.newest_inputs

    def newest_loss(self) -> float:
        return self.per_token(*self.meter.newest)

    def kl_from_start(self) -> float:
        """KL(adapted || as training began) over the newest micro-batch of all processes, bits per supervised token.

        Two forward passes, whose logits are held at once. Synchronises with the device.
        """
        given = self.meter.newest_inputs
        left_out = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head")
        inputs = {name: value for name, value in given.items() if name not in left_out}
        inputs |= _no_cache(inputs)
        mask = counted(given)
        with torch.no_grad(), evaluation_mode(self.model):
            adapted = self.model(**inputs).logits[:, : mask.shape[1]][mask]
            with self.as_it_began():
                reference = self.model(**inputs).logits[:, : mask.shape[1]][mask]
        return self.per_token(summed_kl_of(adapted, reference), mask.sum().double())


def _no_cache(inputs: Mapping[str, Any]) -> dict[str, bool]:
    """Keeps a model in evaluation mode from filling a cache for generation."""
    return {} if "use_cache" in inputs else {"use_cache": False}
