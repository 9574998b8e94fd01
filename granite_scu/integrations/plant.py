"""What the control loop controls in a trainer of transformers."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import gather, reduce
from torch import Tensor, nn
from transformers import TrainingArguments

from granite_scu.config.settings import ControlConfig
from granite_scu.integrations.adapter import Adapter
from granite_scu.integrations.loss_meter import LossMeter
from granite_scu.model.description_length import LowRankUpdate
from granite_scu.model.plant import AdapterPlant


class TrainerPlant(AdapterPlant):
    """A PEFT model that a ``Trainer`` trains.

    Args:
        model: what the trainer calls, before it is wrapped for several processes.
        adapter: its LoRA adapter.
        args: of the trainer.
        optimizer: of the trainer, as accelerate wraps it.
        config: through which actuator lambda acts, and by what measure S is read.
        prior_sigma, n_tokens, gradient_clip, total_steps: as of ``AdapterPlant``.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: Adapter,
        args: TrainingArguments,
        optimizer: Any,
        config: ControlConfig,
        *,
        prior_sigma: float,
        n_tokens: int,
        gradient_clip: float,
        total_steps: int,
    ) -> None:
        acting = config.measure, config.actuator
        super().__init__(prior_sigma, n_tokens, total_steps, gradient_clip, *acting, args.device)
        self.model, self.adapter, self.meter = model, adapter, LossMeter(model, args.device)
        self.scaler = getattr(optimizer, "scaler", None)
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
