"""The one place where the module and a controller meet: measure S, update the law, set lambda, log."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple, Protocol

import lightning as L

from granite_scu.config.errors import Diverged
from granite_scu.control import Controller, Measurement
from granite_scu.control.laws.base import AdapterBenefit, restored
from granite_scu.control.record import as_drift_record, as_record
from granite_scu.model.description_length import information_ratio
from granite_scu.model.drift import anchoring
from granite_scu.training.callbacks.stopwatch import Stopwatch
from granite_scu.training.callbacks.throughput import Monitor
from granite_scu.training.module import GraniteModule, Window
from granite_scu.training.slopes import SlopeSensor

SKIPPED_IN_A_ROW = 50
"""Optimizer steps without one finite among them after which the run stops."""


class Action(NamedTuple):
    """What a controller sets in the module, as the fields of ``Output`` of these names."""

    reg_strength: float
    layers: tuple[float, ...] | None = None
    param_bound: float | None = None


class ControlTick(NamedTuple):
    """What a tick tells its listeners, the same on every rank but for the times in it.

    Attributes:
        record: the line of ``scu_history.json``.
        travel: sum of the learning rates of all applied steps so far.
    """

    record: dict
    travel: float


class Listener(Protocol):
    """Takes part in every tick, the one at the end of the run among them."""

    def on_tick(self, tick: ControlTick, trainer: L.Trainer, module: GraniteModule) -> None: ...


class ShannonControl(L.Callback):
    """Every ``every`` applied optimizer steps (a tick) measures S and sets the module's ``reg_strength``.

    Which steps were applied and which skipped, only the device knows. It is asked when a tick would be due if all
    were applied, and when 50 might have been skipped in a row; what was skipped is made up for before the tick.

    Args:
        controller: the law.
        every: applied optimizer steps between ticks.
        stopwatch: for tokens per second.
        record: takes each tick's record on rank 0.
        monitor: adds throughput, MFU and the device's state to the records.
        listeners: are told of each tick, in this order, when its record is written.
        slopes: reads them for the law; the module must measure them. None: the law does not ask for them.
        drift: measures drift for the law, in the place of a measurement of S; lambda then multiplies drift.
    """

    def __init__(
        self,
        controller: Controller,
        every: int,
        stopwatch: Stopwatch,
        record: Callable[[dict], None] = lambda r: None,
        monitor: Monitor | None = None,
        listeners: Sequence[Listener] = (),
        slopes: SlopeSensor | None = None,
        drift: Callable[[Measurement], Measurement] | None = None,
    ) -> None:
        self.drift = drift
        self.controller, self.every, self.stopwatch, self.record = controller, every, stopwatch, record
        self.monitor, self.listeners, self.slopes = monitor, listeners, slopes
        self.state = controller.init()
        self.action = Action(controller.initial_strength)
        self.latest: dict = {}
        self.saved: AdapterBenefit | None = None
        self.tokens = self.skipped = self.ticks = 0
        self._step = 0
        self._pending = 0  # steps since the last tick, without those that are known to have been skipped
        self._failing = 0  # the most steps that may have been skipped in a row up to now; exact after asking
        self._learning_rate: float | None = None
        self.travel = 0.0

    def on_train_start(self, trainer: L.Trainer, module: GraniteModule) -> None:
        module.act(*self.action)
        self._step = trainer.global_step

    def on_before_optimizer_step(self, trainer: L.Trainer, module: GraniteModule, optimizer) -> None:
        # Taken here, because at the end of the batch the scheduler has moved on to the next step's.
        self._learning_rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: L.Trainer, module: GraniteModule, *_) -> None:
        if trainer.global_step == self._step:  # a micro-batch inside an accumulation window
            return
        self._step = trainer.global_step
        self._pending, self._failing = self._pending + 1, self._failing + 1
        if self._pending >= self.every or self._failing >= SKIPPED_IN_A_ROW:
            self._pending, self._failing = module.counts()
            self._stop_if_failing()
        if self._pending >= self.every:
            self.tick(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if self.latest.get("step") != self._step:
            self.tick(trainer, module)

    def set_benefit(self, saved: AdapterBenefit) -> None:
        """Take what the adapter saves, for the law to see at the next tick."""
        self.saved = saved

    def tick(self, trainer: L.Trainer, module: GraniteModule) -> None:
        """Measure, update, act and log."""
        window = module.read_window()
        self._pending = 0
        self.tokens += window.tokens
        self.skipped += window.skipped
        self.travel += window.travel
        measured = self._measure(trainer, module, window)
        seen = self.drift(measured) if self.drift else measured
        self.state, output = self.controller.update(self.state, seen)
        self.saved = None
        strength = anchoring(output, self.controller.initial_strength) if self.drift else output.reg_strength
        self.action = Action(strength, output.layers, output.param_bound)
        module.act(*self.action)
        setpoint = self.controller.setpoint
        told = (
            as_drift_record(measured, seen, output, setpoint) if self.drift else as_record(measured, output, setpoint)
        )
        self.latest = self._as_record(trainer, window, told)
        self.ticks += 1
        if trainer.is_global_zero:
            self.record(self.latest)
        scalars = {f"scu/{name}": value for name, value in self.latest.items() if isinstance(value, float | int)}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=self._step)
        for listener in self.listeners:
            listener.on_tick(ControlTick(self.latest, self.travel), trainer, module)

    def _measure(self, trainer: L.Trainer, module: GraniteModule, window: Window) -> Measurement:
        return Measurement(
            s=information_ratio(window.data_bpt, window.param_bpt),
            data_bpt=window.data_bpt,
            param_bpt=window.param_bpt,
            layers=window.layer_bpt,
            kl=module.kl_from_start() if self.controller.needs_kl else None,
            step=self._step,
            progress=min(1.0, self._step / module.total_steps),
            travel=self.travel,
            saved=self.saved,
            slopes=self.slopes and self.slopes.read(trainer.datamodule, module, window),
        )

    def _stop_if_failing(self) -> None:
        if self._failing >= SKIPPED_IN_A_ROW:
            raise Diverged(
                f"step {self._step}: loss or gradient was not finite in {self._failing} optimizer steps in a row; "
                "lower --learning-rate, or use --precision fp32 to find the cause (fp16 has no number above 65,504)"
            )

    def _as_record(self, trainer: L.Trainer, window: Window, told: dict) -> dict:
        rate = self.stopwatch.rate(self.tokens)
        steps, seconds = window.applied + window.skipped, window.tokens / rate if rate else 0.0
        return {
            "step": self._step,
            "tokens": self.tokens,
            **told,
            "lr": self._learning_rate,
            "grad_norm": window.grad_norm,
            "data_grad_norm": window.data_grad_norm,
            "penalty_grad_norm": window.penalty_grad_norm,
            "skipped": self.skipped,
            "tokens_per_s": rate,
            **(self.monitor.read(steps, seconds) if self.monitor else {}),
        }

    def state_dict(self) -> dict:
        return {
            "name": type(self.controller).__name__,
            "setpoint": self.controller.setpoint,
            "controller": asdict(self.state),
            "action": self.action._asdict(),
            "counts": [self.tokens, self.skipped, self._pending],
            "travel": self.travel,
            "latest": self.latest,
            "ticks": self.ticks,
            "saved": self.saved and tuple(self.saved),
            "slopes": self.slopes and self.slopes.state_dict(),
            "learning_rate": self._learning_rate,
        }

    def load_state_dict(self, state: dict) -> None:
        self.state = restored(self.controller.init(), state["controller"])
        action = state["action"]
        self.action = Action(**action | {"layers": action["layers"] and tuple(action["layers"])})
        self.tokens, self.skipped, self._pending = state["counts"]
        self.travel, self.latest, self.ticks = state["travel"], state["latest"], state["ticks"]
        self.saved = state["saved"] and AdapterBenefit(*state["saved"])
        self._learning_rate = state["learning_rate"]
        if self.slopes and state.get("slopes"):
            self.slopes.load_state_dict(state["slopes"])


def penalty_share(record: dict) -> float:
    """Norm of the penalty's gradient over that of the data's, of the newest step; 0 where either is missing."""
    data = record["data_grad_norm"]
    share = record["penalty_grad_norm"] / data if data > 0 else 0.0
    return share if share < float("inf") else 0.0
