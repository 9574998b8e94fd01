"""The LightningModule: it trains an adapter under CE + lambda * ParamNPT and knows no controller."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from granite_scu.config.errors import RunFailed, UserError, one_line
from granite_scu.config.settings import IGNORED, BaseConfig, LoraConfig, OptimizerConfig, PriorConfig
from granite_scu.evaluation.score import Score, score
from granite_scu.model import adapters, loading, loss
from granite_scu.model.attention import choose_isolation
from granite_scu.model.compilation import (
    check_selective,
    compile_decoder,
    not_compiled,
    options_of,
    recompute_activations,
)
from granite_scu.model.description_length import LowRankUpdate, Measure, bits
from granite_scu.model.mamba2 import mamba
from granite_scu.model.plant import LOSS_UNIT, AdapterPlant
from granite_scu.model.saved_adapter import SHA256, InitialAdapter
from granite_scu.training.learning_rate import schedule


class GraniteModule(AdapterPlant, L.LightningModule):
    """A causal language model with LoRA adapters, regularised by the adapter's description length.

    Args:
        base: the frozen model, its attention and kernels settled.
        lora: the adapters.
        optimizer: AdamW and its schedule.
        prior: on the entries of Delta W, with N, the tokens that the adapter's description is spread over.
        total_steps: optimizer steps of the whole run, for the schedule.
        dtype: of the frozen weights; adapters are always fp32.
        loading_device: where 4-bit weights are made.
        position: what the position in the data depends on (batch size, processes); a resumed run must not change it.
        measure: what ParamBPT counts, the update or its factors.
        actuator: whether lambda acts through the gradient or, decoupled, on the update after a step.
        start: the adapter that training starts from; None draws a new one.
    """

    def __init__(
        self,
        base: BaseConfig,
        lora: LoraConfig,
        optimizer: OptimizerConfig,
        prior: PriorConfig,
        total_steps: int,
        dtype: torch.dtype = torch.float32,
        loading_device: torch.device = loading.CPU,
        position: dict[str, int] | None = None,
        measure: Measure = "delta",
        actuator: Literal["loss", "decoupled"] = "loss",
        start: InitialAdapter | None = None,
    ) -> None:
        if base.gradient_checkpointing == "selective":
            check_selective(bool(base.compile))
        optimizer = optimizer.resolved()
        acting = optimizer.gradient_clip, measure, actuator
        super().__init__(prior.sigma, prior.n_tokens, total_steps, *acting)
        self.base, self.lora, self.optimizer_config = base, lora, optimizer
        self.dtype_of_base, self.loading_device = dtype, loading_device
        self.position, self.start = position or {}, start
        self.updates: dict[str, LowRankUpdate] = {}
        self.micro_batches = 0
        self.val_bpt = math.nan
        self.strict_loading = False  # a checkpoint holds the adapters only; on_load_checkpoint checks them
        self.model: torch.nn.Module | None = None
        self.origins = torch.nn.ParameterList()
        for name in ("_micro", "_validated"):
            self.register_buffer(name, torch.zeros(2, dtype=torch.float64), persistent=False)

    # Model

    def configure_model(self) -> None:
        """Load the frozen model and attach the adapters, once."""
        if self.model is not None:
            return
        model = loading.load_model(self.base, self.dtype_of_base, self.base.attention, self.loading_device)
        if loading.untested(self.base.name):  # here all processes do so, and no layer is shared out yet
            choose_isolation(model)
        # from_pretrained returns evaluation mode, and Lightning leaves modes as it finds them: without this,
        # neither LoRA's dropout nor gradient checkpointing would act.
        saved = self.start and self.start.adapter
        if saved:
            model = adapters.attach_saved(model, saved.folder, saved.config, self.lora.dropout)
        else:
            model = adapters.attach(model, self.lora)
        self.model = model.train()
        # After the adapters: PEFT would hang a hook on the embedding, which reentrant checkpointing alone needs.
        recompute_activations(self.language_model, self.base.gradient_checkpointing or False)
        if self.dtype_of_base != torch.float32:  # then the precision is a mixed one
            adapters.leave_casting_to_autocast(self.model)
        self.updates = adapters.low_rank_updates(self.model)
        if self.start:
            self._remember_start()
        if self.base.compile:
            compile_decoder(self.language_model, options=options_of(self.base.compile_mode))

    def _remember_start(self) -> None:
        """Keep the factors as they are now, to measure from; checkpoints have them too.

        Frozen parameters and no buffers: these stay the same tensors when the module moves to another device.
        """
        self.origins.extend(torch.nn.Parameter(p.detach().clone(), requires_grad=False) for p in self.factors)
        pairs = zip(self.origins[::2], self.origins[1::2], strict=True)
        self.updates = {name: replace(u, origin=o) for (name, u), o in zip(self.updates.items(), pairs, strict=True)}

    def at_start(self) -> AbstractContextManager[None]:
        """The adapter as training found it, for as long as the context lasts. Only of runs that start from one."""
        return self.at(list(self.origins))

    def part_of(self, learned: Sequence[Tensor], part: float) -> list[Tensor]:
        """Factors that lie a part of the way, 0 to 1, from where training began to those learned: A, B and so on.

        From nothing training begins with a B of zeros, whatever A is.
        """
        began = list(self.origins) or [torch.zeros_like(f) if place % 2 else f for place, f in enumerate(learned)]
        return list(torch._foreach_lerp(began, list(learned), part))

    def load_adapter(self, weights: Mapping[str, Tensor]) -> None:
        """Give the factors the values of an adapter's file, by the names that it has them by."""
        self.put([weights[name] for name in adapters.names_in_file(self.model)])

    @property
    def factors(self) -> list[torch.nn.Parameter]:
        """A and B of every adapted matrix, in the order of the layers: what is trained."""
        return [factor for update in self.updates.values() for factor in (update.a, update.b)]

    def forward(self, input_ids: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        """Summed cross-entropy of a batch in nats. (batch, time) tokens, shifted labels, numbers of documents."""
        with nullcontext() if torch.is_grad_enabled() else not_compiled():
            try:
                # Nothing is compiled without gradients, and the form for the compiler takes four times the memory.
                fused = bool(self.base.compile) and torch.is_grad_enabled()
                return loss.summed_nats(self.language_model, input_ids, labels, documents, compiled=fused)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = one_line(error)[:200]
                raise RunFailed(
                    f"--torch-compile: this model cannot be compiled here ({type(error).__name__}: {reason}); leave it "
                    "out (--no-torch-compile), or try another --compile-mode or a newer PyTorch"
                ) from error

    # Training

    def on_fit_start(self) -> None:
        """Refuse processes that read other files: they would train on, on another text or from another step."""
        if self.trainer.world_size == 1:
            return
        kernels = mamba.kernels_in_use(self.language_model)
        known = {
            "the checkpoint to continue from": self.micro_batches,
            "--precision (auto: what a process's GPU does best)": str(self.dtype_of_base),
            "--kernels (auto: those that proved right on a process's GPU)": kernels and kernels.name,
            **self._frozen_settings(),
        }
        everyones: list[dict] = [{}] * self.trainer.world_size
        torch.distributed.all_gather_object(everyones, known)
        differing = [name for name, value in known.items() if any(other.get(name) != value for other in everyones)]
        if differing:
            raise UserError(
                f"--multi-gpu: the processes have different values of {', '.join(differing)}; start them all with the "
                "same flags, on a file system that all nodes see"
            )

    @property
    def learned(self) -> float:
        """Tokens to learn of the batches since the last step, on this process."""
        return float(self._micro[1])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        nats = self(**batch)
        self._micro += torch.stack([nats.detach().double(), supervised(batch)])
        self.micro_batches += 1
        return nats / LOSS_UNIT

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.prepare_gradient(optimizer)

    @torch.no_grad()
    def prepare_gradient(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn what backward left into the gradient of an optimizer step, in place.

        Micro-batch losses arrive summed, divided by ``LOSS_UNIT`` and, by Lightning, by
        ``accumulate_grad_batches`` (in a short last window too), and averaged over ranks. They become the mean
        over the supervised tokens of the window on all ranks; then lambda * grad ParamNPT is added, exactly, or
        lambda * grad F, with F the drift on the general text whose turn it is, and the sum is clipped. A step with
        anything not finite in it is skipped, on the device where the optimizer can. Runs once per optimizer step,
        after a GradScaler has unscaled.
        """
        nats, tokens = self.reduced(self._micro)
        gradients = [factor.grad for factor in self.factors]
        divided_by = LOSS_UNIT * self.accumulated * self.trainer.world_size  # the micro-batches' sums, on the way here
        torch._foreach_mul_(gradients, (divided_by / tokens.clamp(min=1)).float())
        self.regularise(nats, tokens, optimizer.param_groups[0]["lr"], self.trainer.global_step)
        self.skip_unless_finite(optimizer)
        self.count_step()
        self._micro.zero_()

    def reduced(self, sums: Tensor) -> Tensor:
        """Sums over all ranks; the same bits on each."""
        return self.all_gather(sums).sum(0) if self.trainer.world_size > 1 else sums

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.act_on_update()

    # What the control loop reads

    @property
    def layer_updates(self) -> list[LowRankUpdate]:
        return list(self.updates.values())

    @property
    def process(self) -> tuple[int, int]:
        return self.global_rank, self.trainer.world_size

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    @property
    def accumulated(self) -> int:
        return self.trainer.accumulate_grad_batches

    def summed(self, tensor: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(tensor, reduce_op="sum")

    def precision(self) -> AbstractContextManager[None]:
        return self.trainer.precision_plugin.forward_context()

    def as_it_began(self) -> AbstractContextManager[None]:
        return self.at_start() if self.start else self.model.disable_adapter()

    def configure_optimizers(self) -> dict:
        config, steps = self.optimizer_config, self.total_steps
        optimizer = torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad], lr=config.learning_rate, **self._adam_settings()
        )
        scheduler = LambdaLR(optimizer, lambda step: schedule(step, config.schedule, config.warmup_steps, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _adam_settings(self) -> dict[str, Any]:
        """AdamW's settings beside the rate."""
        config = self.optimizer_config
        # Under a GradScaler the fused kernels would unscale by themselves, after the penalty was added. That they are
        # not asked for does not make torch take the foreach ones: with fused=False it takes a loop over the tensors.
        kernels = {"foreach": True} if self.dtype_of_base == torch.float16 else {"fused": True}
        return {"betas": (0.9, config.beta2), "weight_decay": config.weight_decay, **kernels}

    # Validation

    def on_validation_epoch_start(self) -> None:
        self._validated.zero_()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        nats = self(**batch)
        self._validated += torch.stack([nats.double(), supervised(batch)])

    def on_validation_epoch_end(self) -> None:
        nats, tokens = self.reduced(self._validated).tolist()
        self.val_bpt = bits(nats / max(tokens, 1))  # what is logged is rounded to fp32
        self.log("val_bpt", self.val_bpt, rank_zero_only=False)

    def on_validation_end(self) -> None:
        # Its batches have another shape than those of training, and what they leave in the cache fragments it.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def score(self, batches: Iterable[dict[str, Tensor]]) -> Score:
        """The score of the model as it is now, over all ranks, in the precision of the run."""
        return score(self, batches, model=self, reduce=self.reduced, context=self.precision())

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Keep the adapters only: the base model is found again by its name."""
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: tensor for name, tensor in state.items() if _is_adapter(name)}
        checkpoint["micro_batches"] = self.micro_batches
        checkpoint["frozen"] = self._frozen_settings()
        checkpoint |= self.counted()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        expected = {name: p.shape for name, p in self.state_dict().items() if _is_adapter(name)}
        if expected != {name: p.shape for name, p in checkpoint["state_dict"].items()}:
            raise _other_adapters()
        self.require_same_settings(checkpoint)
        self.micro_batches = checkpoint["micro_batches"]
        self._set_own_settings(checkpoint)
        self.restore_counted(checkpoint)

    def require_same_settings(self, checkpoint: dict) -> None:
        """Refuse a checkpoint that measured or read by other settings; needs no model. Raises UserError."""
        now = self._frozen_settings()
        for name, then in checkpoint["frozen"].items():
            if now.get(name) != then:
                raise UserError(
                    f"--resume-from-checkpoint: {name} was {then} and is now {now.get(name)}; S, the adapter or the "
                    "place in the data would mean something else; resume with the same, or with the version that began "
                    "the run"
                )

    def _set_own_settings(self, checkpoint: dict) -> None:
        """Put this run's rate and AdamW's settings into the checkpoint: its own would be restored in their place."""
        (group,) = checkpoint["optimizer_states"][0]["param_groups"]
        (scheduler,) = checkpoint["lr_schedulers"]
        config, peak = self.optimizer_config, self.optimizer_config.learning_rate
        rate = peak * schedule(scheduler["last_epoch"], config.schedule, config.warmup_steps, self.total_steps)
        group |= self._adam_settings() | {"initial_lr": peak, "lr": rate}
        scheduler |= {"base_lrs": [peak], "_last_lr": [rate]}

    def _frozen_settings(self) -> dict[str, float | str | None]:
        measured = {"--n-tokens": self.n_tokens, "--prior-sigma": self.prior_sigma, "--measure": self.measure}
        start = self.start.sha256 if self.start else "none"
        # Of an adapter to start from its own.
        scale = {} if self.lora.adapter else {"--lora-alpha": self.lora.resolved().alpha, "--rslora": self.lora.rslora}
        return {**measured, "--actuator": self.actuator, SHA256: start, **scale, **self.position}


def check_adapters(checkpoint: dict, n_parameters: int) -> None:
    """Refuse a checkpoint of adapters with another number of parameters. Raises UserError."""
    trained = (tensor for name, tensor in checkpoint["state_dict"].items() if not name.startswith("origins."))
    if sum(tensor.numel() for tensor in trained) != n_parameters:
        raise _other_adapters()


def _other_adapters() -> UserError:
    return UserError(
        "--resume-from-checkpoint: the checkpoint's adapters do not fit this model; "
        "resume with the same --model, --adapter, --lora-r and targets"
    )


def supervised(batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens that a batch is trained on, in fp64."""
    return (batch["labels"] != IGNORED).sum().double()


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name or name.startswith("origins.")
