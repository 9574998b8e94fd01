"""The LightningModule: it trains an adapter under CE + reg_strength * ParamNPT and knows no controller.

``reg_strength`` (lambda) is an attribute that anyone may set between optimizer steps; at its default of
zero this is plain LoRA fine-tuning. Sums are kept on the device and divided once, where they are read.
"""

import math
from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from granite_scu.config import BaseConfig, LoraConfig, OptimizerConfig
from granite_scu.errors import UserError
from granite_scu.information import LowRankUpdate, bits, param_npt, penalty_gradient
from granite_scu.model import adapters, loading, loss

LOSS_UNIT = 4096
"""Tokens that a micro-batch's summed loss is divided by before the backward pass and multiplied by after it.

A constant power of two: exact, and it keeps fp16's scaled gradients near those of a mean."""

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": torch.float32}
"""What the frozen weights are held in under each of Lightning's precisions."""


@dataclass(frozen=True)
class Window:
    """What happened over the optimizer steps since the last reading, over all ranks.

    Attributes:
        nats: summed cross-entropy of the applied steps.
        tokens: supervised tokens of the applied steps.
        applied: optimizer steps that changed the weights.
        skipped: optimizer steps left out because a loss or gradient was not finite.
        data_bpt: cross-entropy in bits per token; NaN when no step was applied.
        param_bpt: bits per token that describe the adapter now.
        grad_norm: of the last step, data and penalty together, before clipping.
        data_grad_norm: of the cross-entropy alone.
        penalty_grad_norm: of reg_strength * ParamNPT alone.
    """

    nats: float
    tokens: int
    applied: int
    skipped: int
    data_bpt: float
    param_bpt: float
    grad_norm: float
    data_grad_norm: float
    penalty_grad_norm: float


class GraniteModule(L.LightningModule):
    """A causal language model with LoRA adapters, regularised by the adapter's description length.

    Args:
        base: the frozen model.
        lora: the adapters.
        optimizer: AdamW and its schedule.
        prior_sigma: standard deviation of the prior on the entries of Delta W.
        n_tokens: N, the tokens that the adapter's description is spread over.
        total_steps: optimizer steps of the whole run, for the schedule.
        dtype: of the frozen weights; adapters are always fp32.
        attention: transformers' attention implementation.
        loading_device: where 4-bit weights are made.
        position: what the position in the data hangs on (batch size, processes); a resumed run must not change it.
    """

    def __init__(
        self,
        base: BaseConfig,
        lora: LoraConfig,
        optimizer: OptimizerConfig,
        prior_sigma: float,
        n_tokens: int,
        total_steps: int,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        loading_device: torch.device = loading.CPU,
        position: dict[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.base, self.lora, self.optimizer_config = base, lora, optimizer
        self.prior_sigma, self.n_tokens, self.total_steps = prior_sigma, n_tokens, total_steps
        self.dtype_of_base, self.attention, self.loading_device = dtype, attention, loading_device
        self.position = position or {}
        self.updates: dict[str, LowRankUpdate] = {}
        self.reg_strength = 0.0
        self.micro_batches = 0
        self.strict_loading = False  # a checkpoint holds the adapters only; on_load_checkpoint checks them
        self.model: torch.nn.Module | None = None
        for name, size in (("_micro", 2), ("_since_read", 4), ("_norms", 3), ("_validated", 2)):
            self.register_buffer(name, torch.zeros(size, dtype=torch.float64), persistent=False)

    # Model

    def configure_model(self) -> None:
        """Load the frozen model and attach the adapters, once."""
        if self.model is not None:
            return
        model = loading.load_model(self.base, self.dtype_of_base, self.attention, self.loading_device)
        if self.base.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        # from_pretrained returns evaluation mode, and Lightning leaves modes as it finds them: without this,
        # neither LoRA's dropout nor gradient checkpointing would act.
        self.model = adapters.attach(model, self.lora).train()
        self.updates = adapters.low_rank_updates(self.model)
        if self.base.compile:
            self.language_model.base_model.compile(mode=self.base.compile_mode)

    @property
    def language_model(self) -> torch.nn.Module:
        """The transformers model, its adapted layers in place."""
        return self.model.get_base_model()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Summed cross-entropy of a batch in nats: (batch, time) tokens and already shifted labels."""
        return loss.summed_nats(self.language_model, input_ids, labels)

    # Training

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        nats = self(batch["input_ids"], batch["labels"])
        self._micro += torch.stack([nats.detach().double(), _supervised(batch)])
        self.micro_batches += 1
        return nats / LOSS_UNIT

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.prepare_gradient(optimizer)

    @torch.no_grad()
    def prepare_gradient(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn what backward left into the gradient of an optimizer step, in place.

        Micro-batch losses arrive summed, divided by ``LOSS_UNIT`` and, by Lightning, by
        ``accumulate_grad_batches`` (in a short last window too), and averaged over ranks. They become the mean
        over the supervised tokens of the window on all ranks; then lambda * grad ParamNPT is added, exactly,
        and the sum is clipped. A step with anything not finite in it is skipped, on the device where the
        optimizer can. Runs once per optimizer step, after a GradScaler has unscaled.
        """
        nats, tokens = self.reduced(self._micro)
        gradients = [p.grad for u in self.updates.values() for p in (u.a, u.b)]
        torch._foreach_mul_(gradients, (self._backward_scale() / tokens.clamp(min=1)).float())
        data_norm = torch.nn.utils.get_total_norm(gradients)
        penalty_norm = torch.zeros_like(data_norm)
        if self.reg_strength:
            pairs = penalty_gradient(list(self.updates.values()), self.prior_sigma, self.n_tokens)
            penalty = [gradient for pair in pairs for gradient in pair]
            penalty_norm = self.reg_strength * torch.nn.utils.get_total_norm(penalty)
            torch._foreach_add_(gradients, penalty, alpha=self.reg_strength)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.optimizer_config.gradient_clip:
            torch.nn.utils.clip_grads_with_norm_(
                [p for u in self.updates.values() for p in (u.a, u.b)], self.optimizer_config.gradient_clip, norm
            )
        finite = torch.isfinite(torch.stack([nats, data_norm, penalty_norm, norm])).all()
        self._skip_unless(finite, optimizer)
        self._count(nats, tokens, finite, torch.stack([norm, data_norm, penalty_norm]))

    def _backward_scale(self) -> float:
        """What the micro-batches' summed gradients were divided by on the way here."""
        return LOSS_UNIT * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def reduced(self, sums: Tensor) -> Tensor:
        """Sums over all ranks; the same bits on each."""
        return self.all_gather(sums).sum(0) if self.trainer.world_size > 1 else sums

    def _skip_unless(self, finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.param_groups[0].get("fused"):
            # The fused kernels read this flag on the device and leave weights and moments alone.
            optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()
        elif not bool(finite):
            optimizer.zero_grad(set_to_none=True)

    def _count(self, nats: Tensor, tokens: Tensor, finite: Tensor, norms: Tensor) -> None:
        step = torch.stack([nats, tokens, torch.ones_like(nats), torch.zeros_like(nats)])
        skip = torch.zeros_like(step)
        skip[3] = 1
        self._since_read += torch.where(finite, step, skip)
        self._norms.copy_(norms)
        self._micro.zero_()

    def counts(self) -> tuple[int, int]:
        """Optimizer steps (applied, skipped) since the last reading. Synchronises with the device."""
        applied, skipped = self._since_read[2:].tolist()
        return int(applied), int(skipped)

    def read_window(self) -> Window:
        """Read, reduce and reset what was counted since the last reading. Synchronises with the device."""
        nats, tokens, applied, skipped = self._since_read.tolist()
        self._since_read.zero_()
        norm, data_norm, penalty_norm = self._norms.tolist()
        return Window(
            nats=nats,
            tokens=int(tokens),
            applied=int(applied),
            skipped=int(skipped),
            data_bpt=bits(nats / tokens) if tokens else math.nan,
            param_bpt=self.param_bpt(),
            grad_norm=norm,
            data_grad_norm=data_norm,
            penalty_grad_norm=penalty_norm,
        )

    @torch.no_grad()
    def param_bpt(self) -> float:
        """Bits per token that describe the adapter as it is now."""
        return bits(param_npt(list(self.updates.values()), self.prior_sigma, self.n_tokens).item())

    def configure_optimizers(self) -> dict:
        config = self.optimizer_config
        # Under a GradScaler the fused kernel would unscale by itself, after the penalty was added.
        fused = self.trainer.precision != "16-mixed"
        optimizer = torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad],
            lr=config.learning_rate,
            betas=(0.9, config.beta2),
            weight_decay=0.0,
            fused=fused,
        )
        scheduler = LambdaLR(optimizer, lambda step: schedule(step, config, self.total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # Validation

    def on_validation_epoch_start(self) -> None:
        self._validated.zero_()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        nats = self(batch["input_ids"], batch["labels"])
        self._validated += torch.stack([nats.double(), _supervised(batch)])

    def on_validation_epoch_end(self) -> None:
        nats, tokens = self.reduced(self._validated).tolist()
        self.log("val_bpt", bits(nats / max(tokens, 1)), rank_zero_only=False)

    test_step = validation_step

    def on_test_epoch_start(self) -> None:
        self._validated.zero_()

    def on_test_epoch_end(self) -> None:
        nats, tokens = self.reduced(self._validated).tolist()
        self.log("test_bpt", bits(nats / max(tokens, 1)), rank_zero_only=False)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Keep the adapters only: the base model is found again by its name."""
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: tensor for name, tensor in state.items() if _is_adapter(name)}
        checkpoint["micro_batches"] = self.micro_batches
        checkpoint["frozen"] = self._frozen_settings()
        checkpoint["counters"] = self._since_read.tolist()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        expected = {name: p.shape for name, p in self.state_dict().items() if _is_adapter(name)}
        found = {name: p.shape for name, p in checkpoint["state_dict"].items()}
        if expected != found:
            raise UserError(
                "--resume-from-checkpoint: the checkpoint's adapters do not fit this model; "
                "resume with the same --model, --lora-r and targets"
            )
        for name, then in checkpoint["frozen"].items():
            now = self._frozen_settings().get(name)
            if now != then:
                raise UserError(
                    f"--resume-from-checkpoint: {name} was {then} and is now {now}; S or the place in the data would "
                    "mean something else, so resume with the same"
                )
        self.micro_batches = checkpoint["micro_batches"]
        self._since_read.copy_(torch.tensor(checkpoint["counters"], dtype=torch.float64))

    def _frozen_settings(self) -> dict[str, float]:
        return {"--n-tokens": self.n_tokens, "--prior-sigma": self.prior_sigma, **self.position}


def schedule(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The learning rate at an optimizer step, as a fraction of its peak: warm-up, then the course chosen."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    match config.schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return 1 - progress
        case _:
            return 1.0


def _supervised(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != loss.IGNORED).sum().double()


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
