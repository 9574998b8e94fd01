"""Stops a run that has settled."""

import logging
from dataclasses import asdict

import lightning as L

from granite_scu.control.diagnostics.equilibrium import Effect, Equilibrium, Tick, from_mappings
from granite_scu.control.laws.base import as_stored, restored
from granite_scu.model.description_length import decay
from granite_scu.training.callbacks.shannon_control import ControlTick, penalty_share
from granite_scu.training.module import GraniteModule

log = logging.getLogger(__name__)


class EquilibriumStop(L.Callback):
    """Asks ``rule`` at every tick; when it says so, the run ends there, its optimizer step complete.

    A tick of a run that ends there anyway is remembered, for a run that continues from it, but decides nothing: the
    extra tick at the end, the one at the last step, and the one after which the time is over.

    Args:
        rule: the decision.
        every: optimizer steps between ticks.
    """

    def __init__(self, rule: Equilibrium, every: int) -> None:
        self.rule, self.every = rule, every
        self.ticks: tuple[Tick, ...] = ()
        self.stopped_at: int | None = None
        self.rise: float | None = None  # the summed learning rates with which S first came up to its band
        self.effect = Effect()  # of lambda on the adapter, since then

    def on_train_batch_start(self, *_) -> None:
        self.stopped_at = None  # a run that takes another step continues from where one had stopped

    @property
    def stop_reason(self) -> str | None:
        """Why this ended the run; None where it did not."""
        return None if self.stopped_at is None else "equilibrium"

    def on_tick(self, tick: ControlTick, trainer: L.Trainer, module: GraniteModule) -> None:
        record = tick.record
        self.ticks = (*self.ticks, self._observed(tick, module))[-self.rule.window :]
        if trainer.should_stop or trainer.global_step >= trainer.max_steps:
            return
        decision = self.rule.decide(self.ticks)
        # Ranks see the same records; the agreement costs little and rules out that one leaves the others waiting.
        if trainer.strategy.reduce_boolean_decision(decision.stop, all=True):
            self.stopped_at = record["step"]
            trainer.should_stop = True
            if trainer.is_global_zero:
                log.info("step %d: stops at equilibrium: %s", record["step"], decision.reason)

    def _observed(self, tick: ControlTick, module: GraniteModule) -> Tick:
        record, lr_sum = tick
        if self.rise is None and (record["s_ema"] or 0.0) >= (1 - self.rule.band) * self.rule.setpoint:
            self.rise = lr_sum
        if self.rise is not None:
            self.effect = self.effect.update(record["param_bpt"], record["lambda"], lr_sum)
        return Tick(
            step=record["step"],
            s=record["s_ema"],
            lam=record["lambda"],
            data_bpt=record["data_bpt"],
            saturated=record["saturated"],
            held=record["held"],
            in_deadband=record["in_deadband"],
            authority=self._authority(module, record),
            lr_sum=lr_sum / self.rise if self.rise else 0.0,
            effect=self.effect.score,
        )

    def _authority(self, module: GraniteModule, record: dict) -> float:
        if module.actuator == "loss":
            return penalty_share(record)
        step = decay(record["lambda"], record["lr"] or 0.0, module.prior_sigma, module.n_tokens)
        return 1 - step ** (4 * self.every)  # |Delta W|^2 goes with the fourth power of the factors' scale

    def state_dict(self) -> dict:
        return {
            "ticks": [as_stored(asdict(tick)) for tick in self.ticks],
            "stopped_at": self.stopped_at,
            "rise": self.rise,
            "effect": asdict(self.effect),
        }

    def load_state_dict(self, state: dict) -> None:
        self.ticks, self.stopped_at = from_mappings(state["ticks"]), state["stopped_at"]
        self.rise = state["rise"]
        self.effect = restored(Effect(), state["effect"])
