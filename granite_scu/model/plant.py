"""What the control loop controls, whoever trains it: the optimizer steps of an adapter under lambda, and their count.

Sums are kept on the device and divided once, where they are read: nothing here waits for it between two ticks.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from granite_scu.control.loop import Window
from granite_scu.model.description_length import (
    LN2,
    LowRankUpdate,
    Measure,
    bits,
    decay,
    information_ratio,
    layer_npt,
    scale_onto,
    weighted_penalty,
)
from granite_scu.model.drift import Trained

LOSS_UNIT = 4096
"""Tokens that a summed loss is divided by before its gradient is taken, and multiplied by after it.

A constant power of two: exact, and it keeps fp16's scaled gradients near those of a mean."""

SUMS = {"_since_read": 5, "_skipped_in_a_row": 1, "_norms": 3}
"""(nats, tokens, applied, skipped, lr_sum) since the last reading; norms of the gradient, the data's, the penalty's."""


class AdapterPlant(nn.Module):
    """A model whose adapter is trained under CE + lambda * ParamNPT. It knows no controller.

    ``lam`` (lambda) is set between optimizer steps, by ``set_regularisation`` or alone; at its default of zero
    this is plain LoRA fine-tuning. So are ``layer_lams``, which tells matrices apart, and ``param_bound``, onto
    which the update is projected. With ``drift_gradient`` set, lambda multiplies drift in the place of ParamNPT.

    A trainer calls, once an optimizer step, ``regularise`` with the gradient of the mean loss in ``.grad``,
    ``skip_unless_finite``, ``count_step`` and, after the update, ``act_on_update``.

    Args:
        prior_sigma: standard deviation of the prior on the entries of Delta W.
        n_tokens: N, the tokens that the description of the adapter is spread over.
        total_steps: optimizer steps of the run.
        gradient_clip: largest gradient norm, data and penalty together; 0 does not clip.
        measure: what ParamBPT counts, the update or its factors.
        actuator: whether lambda acts through the gradient or, decoupled, on the update after a step.
        device: of the sums.
    """

    def __init__(
        self,
        prior_sigma: float,
        n_tokens: int,
        total_steps: int,
        gradient_clip: float,
        measure: Measure = "delta",
        actuator: Literal["loss", "decoupled"] = "loss",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.prior_sigma, self.n_tokens, self.total_steps = prior_sigma, n_tokens, total_steps
        self.gradient_clip, self.measure, self.actuator = gradient_clip, measure, actuator
        self.lam = 0.0
        self.layer_lams: tuple[float, ...] | None = None
        self.param_bound: float | None = None
        self.drift_gradient: Callable[[int], list[Tensor]] | None = None
        self._of_step, self._rate = torch.zeros(2, dtype=torch.float64, device=device), 0.0
        self.register_buffer("_finite", torch.ones((), dtype=torch.bool, device=device), persistent=False)
        for name, size in SUMS.items():
            self.register_buffer(name, torch.zeros(size, dtype=torch.float64, device=device), persistent=False)

    # What differs between trainers

    model: nn.Module
    """With its adapted layers."""

    process: tuple[int, int]
    """The number of this process, and how many there are."""

    scaler: torch.amp.GradScaler | None
    """Of the loss, in fp16."""

    accumulated: int
    """Micro-batches of an optimizer step."""

    @property
    @abstractmethod
    def factors(self) -> Sequence[Tensor]:
        """A and B of every adapted matrix, in the order of the layers."""

    @property
    @abstractmethod
    def layer_updates(self) -> list[LowRankUpdate]:
        """The updates of the adapted matrices as they are now, in fp32 or wider."""

    @abstractmethod
    def reduced(self, sums: Tensor) -> Tensor:
        """Sums over all processes; the same bits on each."""

    @abstractmethod
    def summed(self, tensor: Tensor) -> Tensor:
        """The same of a large one."""

    @abstractmethod
    def precision(self) -> AbstractContextManager[None]:
        """A context in which the model computes as in training, and what is computed counts nowhere."""

    @abstractmethod
    def as_it_began(self) -> AbstractContextManager[None]:
        """A context in which the model is what it was as training began."""

    @contextmanager
    def at(self, values: Sequence[Tensor]) -> Iterator[None]:
        """The factors have these values for as long as the context lasts."""
        kept = [factor.detach().clone() for factor in self.factors]
        self.put(values)
        try:
            yield
        finally:
            self.put(kept)

    @torch.no_grad()
    def put(self, values: Sequence[Tensor]) -> None:
        """Give the factors these values."""
        torch._foreach_copy_(self.factors, values)
        torch.clear_autocast_cache()  # inside autocast, forward passes would use copies of the factors before

    @property
    def language_model(self) -> nn.Module:
        """The transformers model, its adapted layers in place."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def trained(self) -> list[Tensor]:
        """The factors that get a gradient: all, but for methods that freeze every A."""
        return [factor for factor in self.factors if factor.requires_grad]

    def as_trained(self) -> Trained:
        """What general text is read with, and drift is anchored by; its model in place, at any step of the run."""
        contexts = self.as_it_began, self.precision
        return Trained(self.language_model, self.trained, *contexts, self.summed, self.process, self._unit)

    def _unit(self) -> Tensor:
        """As in training: fp16's gradients vanish without the scale, and overflow at one that accumulation has let
        grow."""
        unit = torch.full((), 1 / (LOSS_UNIT * self.accumulated), device=self._finite.device)
        return self.scaler.scale(unit) if self.scaler else unit

    # Lambda

    def set_regularisation(self, lam: float, layers: tuple[float, ...] | None, param_bound: float | None) -> None:
        """Train on under this lambda, these of each adapted matrix in its place, and this bound in bits per token."""
        self.lam, self.layer_lams, self.param_bound = lam, layers, param_bound

    @torch.no_grad()
    def regularise(self, nats: Tensor, tokens: Tensor, rate: float, step: int) -> None:
        """Add lambda * grad ParamNPT, or of drift, to ``.grad`` of the mean loss, then clip.

        Args:
            nats, tokens: of the step, over all processes; in fp64.
            rate: the learning rate that the step is taken with.
            step: optimizer steps done, which says whose turn it is of the general text.
        """
        trained = self.trained
        gradients = [factor.grad for factor in trained]
        data_norm = torch.nn.utils.get_total_norm(gradients)
        penalty_norm = torch.zeros_like(data_norm)
        if self.actuator == "loss" and any(self._lams()):
            penalty = self._drift_penalty(step) if self.drift_gradient else self._penalty()
            penalty_norm = torch.nn.utils.get_total_norm(penalty)
            torch._foreach_add_(gradients, penalty)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.gradient_clip:
            torch.nn.utils.clip_grads_with_norm_(trained, self.gradient_clip, norm)
        self._of_step, self._rate = torch.stack([nats, tokens]), rate
        norms = torch.stack([norm, data_norm, penalty_norm])
        self._norms.copy_(norms)
        self._finite.copy_(torch.isfinite(nats) & torch.isfinite(norms).all())

    def skip_unless_finite(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer leave out the step that ``regularise`` prepared where anything in it is not finite."""
        if optimizer.param_groups[0].get("fused") and not self.scaler:  # which would set the flag to what it has found
            # The fused kernels read this flag on the device and leave weights and moments alone.
            optimizer.grad_scale, optimizer.found_inf = None, (~self._finite).float()
        elif not bool(self._finite):
            optimizer.zero_grad(set_to_none=True)

    def _lams(self) -> list[float]:
        """Lambda of each adapted matrix."""
        return list(self.layer_lams or [self.lam] * (len(self.factors) // 2))

    def _penalty(self) -> list[Tensor]:
        """The gradient of the weighted ParamNPT, by those factors that are trained."""
        lams = self._lams()
        all_of = weighted_penalty(self.layer_updates, lams, self.prior_sigma, self.n_tokens, self.measure)
        return [gradient for gradient, factor in zip(all_of, self.factors, strict=True) if factor.requires_grad]

    def _drift_penalty(self, step: int) -> list[Tensor]:
        """The gradient of lambda times drift, by those factors that are trained."""
        assert self.drift_gradient
        penalty = self.drift_gradient(step)
        torch._foreach_mul_(penalty, self.lam)
        return penalty

    def count_step(self, skipped: bool = False) -> None:
        """Count the step that ``regularise`` prepared: as applied, or, where it is not finite, as skipped.

        Args:
            skipped: it was, for another reason.
        """
        if skipped:
            self._finite.zero_()
        nats, tokens = self._of_step
        one, zero = torch.ones_like(nats), torch.zeros_like(nats)
        if_applied = torch.stack([nats, tokens, one, zero, self._rate * one])
        if_skipped = torch.stack([zero, zero, zero, one, zero])
        self._since_read += torch.where(self._finite, if_applied, if_skipped)
        self._skipped_in_a_row.add_(1).mul_(~self._finite)

    @torch.no_grad()
    def act_on_update(self) -> None:
        """Act on the update itself, after a step that was not skipped: decoupled lambda, and the projection."""
        if self.actuator == "decoupled" and any(self._lams()):
            decays = [decay(x, self._rate, self.prior_sigma, self.n_tokens, self.measure) for x in self._lams()]
            # A tensor made of them here would be a copy to the device, which is waited for.
            factors = {factor: torch.where(self._finite, factor, 1.0) for factor in set(decays)}
            self._scale_factors([factors[factor] for factor in decays])
        if self.param_bound is not None:
            root = scale_onto(self._layer_npt().sum(), self.param_bound * LN2, self.measure)
            self._scale_factors([torch.where(self._finite, root, 1.0)] * (len(self.factors) // 2))

    def _scale_factors(self, scales: list[Tensor]) -> None:
        """Multiply A and B of each matrix by its scale."""
        torch._foreach_mul_(self.factors, [scale.float() for scale in scales for _ in ("a", "b")])

    # What is read. All of it synchronises with the device

    @property
    def latest_step_was_finite(self) -> bool:
        """Whether the newest optimizer step was applied."""
        return bool(self._finite)

    def counts(self) -> tuple[int, int]:
        """Optimizer steps applied since the last reading, and the newest ones that were skipped, in a row up to now."""
        applied, in_a_row = torch.cat([self._since_read[2:3], self._skipped_in_a_row]).tolist()
        return int(applied), int(in_a_row)

    def read_window(self) -> Window:
        """Read and reset what was counted since the last reading."""
        nats, tokens, applied, skipped, lr_sum = self._since_read.tolist()
        self._since_read.zero_()
        norm, data_norm, penalty_norm = self._norms.tolist()
        layers = self.layer_bpt()
        data_bpt, param_bpt = bits(nats / tokens) if tokens else math.nan, math.fsum(layers)
        return Window(
            nats=nats,
            tokens=int(tokens),
            applied=int(applied),
            skipped=int(skipped),
            lr_sum=lr_sum,
            s=information_ratio(data_bpt, param_bpt),
            data_bpt=data_bpt,
            param_bpt=param_bpt,
            layer_bpt=layers,
            grad_norm=norm,
            data_grad_norm=data_norm,
            penalty_grad_norm=penalty_norm,
        )

    def layer_bpt(self) -> tuple[float, ...]:
        """Bits per token that describe each adapted matrix as it is now."""
        return tuple(bits(npt) for npt in self._layer_npt().tolist())

    @torch.no_grad()
    def _layer_npt(self) -> Tensor:
        return layer_npt(self.layer_updates, self.prior_sigma, self.n_tokens, self.measure)

    # Checkpoints

    def counted(self) -> dict[str, list[float]]:
        """What was counted since the last reading, ready for JSON. The same in every process."""
        return {"counters": self._since_read.tolist(), "norms": self._norms.tolist()}

    def restore_counted(self, state: Mapping[str, Any]) -> None:
        """Count on from there."""
        self._since_read.copy_(torch.tensor(state["counters"], dtype=torch.float64))
        self._norms.copy_(torch.tensor(state["norms"], dtype=torch.float64))
