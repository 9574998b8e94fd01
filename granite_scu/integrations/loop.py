"""The control loop around an optimizer step: measure S, update the law, let lambda act on A and B."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from granite_scu.config.settings import ControlConfig
from granite_scu.control import Controller
from granite_scu.control.laws.base import Measurement, Output, restored
from granite_scu.control.record import as_drift_record, as_record
from granite_scu.integrations.adapter import Adapter
from granite_scu.integrations.drift import HeldDrift
from granite_scu.integrations.loss_meter import LossMeter
from granite_scu.integrations.readings import SlopeReader, kl_from_start
from granite_scu.model.description_length import (
    LN2,
    along_scale,
    bits,
    decay,
    information_ratio,
    layer_npt,
    scale_onto,
)
from granite_scu.model.drift import anchoring


@dataclass(frozen=True)
class Plant:
    """What is controlled.

    Attributes:
        model: what the trainer calls, before it is wrapped for several processes.
        adapter: its LoRA adapter.
        meter: of the trainer's losses.
        reduce: sums over all processes.
        slopes: reads them, for a law that asks for them.
        drift: is held in the place of S; lambda then multiplies drift.
    """

    model: nn.Module
    adapter: Adapter
    meter: LossMeter
    reduce: Callable[[Tensor], Tensor]
    slopes: SlopeReader | None = None
    drift: HeldDrift | None = None


class Loop:
    """One training run's loop.

    Args:
        plant: what is controlled.
        law: the controller.
        config: when it acts, by what measure and through which actuator.
        sigma: standard deviation of the prior on the entries of Delta W.
        n_tokens: N, the tokens that the description of the adapter is spread over.
        gradient_clip: largest gradient norm, data and penalty together; 0 does not clip.
        total_steps: optimizer steps of the run.
    """

    def __init__(
        self,
        plant: Plant,
        law: Controller,
        config: ControlConfig,
        sigma: float,
        n_tokens: int,
        gradient_clip: float,
        total_steps: int,
    ) -> None:
        self.plant, self.law, self.config = plant, law, config
        self.sigma, self.n_tokens, self.measure = sigma, n_tokens, config.measure
        self.gradient_clip, self.total_steps = gradient_clip, total_steps
        self.output = Output(law.initial_strength)
        self._law_state = law.init()
        self._step_sums = self._sums = torch.zeros_like(plant.meter.newest)  # of this optimizer step, since the tick
        self._step_slope = self._slope = torch.zeros_like(self._sums[0])
        self._norms = torch.zeros(3)
        self._step_rate = 0.0
        self._applied = self._skipped = self._tokens = 0
        self._window_travel = self._travel = 0.0

    @torch.no_grad()
    def prepare_gradient(self, optimizer: Any, step: int) -> None:
        """Add lambda * grad ParamNPT, or of drift, to the gradient of the mean loss, then clip. Once an optimizer step.

        The trainer has averaged over the supervised tokens of the window on all processes, and unscaled.

        Args:
            optimizer: whose first learning rate is the step's.
            step: optimizer steps done, which says whose turn it is of the general text.
        """
        self._step_rate = optimizer.param_groups[0]["lr"]
        self._step_sums = self.plant.reduce(self.plant.meter.take())
        trained = self.plant.adapter.trained
        for factor in trained:
            if factor.grad is None:  # of a layer that took no part in the step
                factor.grad = torch.zeros_like(factor)
        gradients = [factor.grad for factor in trained]
        if self.law.needs_slopes:
            self._step_slope = self._slope_of_data() * self._step_sums[1]
        data_norm = torch.nn.utils.get_total_norm(gradients)
        penalty_norm = torch.zeros_like(data_norm)
        if self.config.actuator == "loss" and any(self._strengths()):
            penalty = self._penalty(step)
            penalty_norm = torch.nn.utils.get_total_norm(penalty)
            torch._foreach_add_(gradients, penalty)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.gradient_clip:
            torch.nn.utils.clip_grads_with_norm_(trained, self.gradient_clip, norm)
        self._norms = torch.stack([norm, data_norm, penalty_norm])

    def finish_step(self, skipped: bool) -> None:
        """Count the step, and act on the update itself where the actuator or the law wants that.

        Args:
            skipped: a GradScaler left the step out.
        """
        if skipped:
            self._skipped += 1
            return
        self._sums = self._sums + self._step_sums
        if self.law.needs_slopes:
            self._slope = self._slope + self._step_slope
        self._applied += 1
        self._window_travel += self._step_rate
        self._shrink()

    def is_due(self, step: int) -> bool:
        """Whether a tick follows this optimizer step: every so many applied ones, and at the end of the run."""
        return self._applied >= self.config.every or step >= self.total_steps

    def tick(self, step: int, scale: float) -> dict[str, Any]:
        """Measure, update the law, act; returns the record.

        Args:
            step: optimizer steps done.
            scale: of a GradScaler, or 1, over the micro-batches of a step.
        """
        measured = self._measure(step, scale)
        drift, setpoint = self.plant.drift, self.law.setpoint
        seen = drift.measurement(measured) if drift else measured
        self._law_state, self.output = self.law.update(self._law_state, seen)
        told = as_record(measured, self.output, setpoint)
        if drift:
            told = as_drift_record(measured, seen, self.output, setpoint)
        norm, data_norm, penalty_norm = self._norms.tolist()
        return {
            "step": step,
            "tokens": self._tokens,
            **told,
            "lr": self._step_rate,
            "grad_norm": norm,
            "data_grad_norm": data_norm,
            "penalty_grad_norm": penalty_norm,
            "skipped": self._skipped,
        }

    def state(self) -> dict[str, Any]:
        """What a resumed run continues from, ready for JSON. The same in every process."""
        return {
            "law": asdict(self._law_state),
            "output": asdict(self.output),
            "sums": self._sums.tolist(),
            "slope": self._slope.item(),
            "counts": [self._applied, self._skipped, self._tokens],
            "travel": [self._window_travel, self._travel],
            "slopes": self.plant.slopes and self.plant.slopes.state(),
            "drift": self.plant.drift and self.plant.drift.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._law_state = restored(self.law.init(), state["law"])
        self.output = restored(self.output, state["output"])
        self._sums = self._sums.new_tensor(state["sums"])
        self._slope = self._slope.new_tensor(state["slope"])
        self._applied, self._skipped, self._tokens = state["counts"]
        self._window_travel, self._travel = state["travel"]

    def _measure(self, step: int, scale: float) -> Measurement:
        nats, tokens = self._sums.tolist()
        slope = bits(-self._slope.item() / tokens) if tokens else math.nan
        layers = tuple(bits(npt) for npt in self._layer_npt().tolist())
        data_bpt, param_bpt = bits(nats / tokens) if tokens else math.nan, math.fsum(layers)
        self._tokens += int(tokens)
        self._travel += self._window_travel
        self._sums, self._slope = torch.zeros_like(self._sums), torch.zeros_like(self._slope)
        self._applied, self._window_travel = 0, 0.0
        plant = self.plant
        return Measurement(
            s=information_ratio(data_bpt, param_bpt),
            data_bpt=data_bpt,
            param_bpt=param_bpt,
            layers=layers,
            kl=kl_from_start(plant.model, plant.adapter, plant.meter, plant.reduce) if self.law.needs_kl else None,
            step=step,
            progress=min(1.0, step / self.total_steps),
            travel=self._travel,
            slopes=plant.slopes and plant.slopes.read(slope, scale),
        )

    def _strengths(self) -> list[float]:
        """Lambda of each adapted matrix."""
        strength = self.output.reg_strength
        if self.plant.drift:
            strength = anchoring(self.output, self.law.initial_strength)
        return list(self.output.layers or [strength] * (len(self.plant.adapter.factors) // 2))

    def _penalty(self, step: int) -> list[Tensor]:
        """The gradient of what lambda multiplies, times lambda, by the trained factors."""
        strengths, drift = self._strengths(), self.plant.drift
        if drift is None:
            return self.plant.adapter.penalty(strengths, self.sigma, self.n_tokens, self.measure)
        penalty = drift.gradient(step)
        torch._foreach_mul_(penalty, strengths[0])
        return penalty

    @torch.no_grad()
    def _layer_npt(self) -> Tensor:
        return layer_npt(self.plant.adapter.updates(), self.sigma, self.n_tokens, self.measure)

    def _slope_of_data(self) -> Tensor:
        """dL/dx of the loss that ``.grad`` is the gradient of, x the scale of the update."""
        adapter = self.plant.adapter
        return along_scale([factor.grad.float() for factor in adapter.scaled], adapter.updates())

    def _shrink(self) -> None:
        """Decoupled lambda, and the projection."""
        strengths = self._strengths()
        if self.config.actuator == "decoupled" and any(strengths):
            scales = [decay(x, self._step_rate, self.sigma, self.n_tokens, self.measure) for x in strengths]
            self.plant.adapter.scale(scales)
        if self.output.param_bound is not None:
            root = scale_onto(self._layer_npt().sum(), self.output.param_bound * LN2, self.measure)
            self.plant.adapter.scale([root.float()] * len(strengths))
