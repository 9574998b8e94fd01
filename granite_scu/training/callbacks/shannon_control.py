"""The control loop in Lightning's hooks, and who is told of each tick."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning as L

from granite_scu.config.errors import Diverged
from granite_scu.control import Controller, Measurement
from granite_scu.control.loop import ControlLoop, Window
from granite_scu.training.callbacks.throughput import Monitor, Stopwatch
from granite_scu.training.module import GraniteModule


class ControlTick(NamedTuple):
    """What a tick tells its listeners, the same on every rank but for the times in it.

    Attributes:
        record: the line of ``scu_history.json``.
        lr_sum: sum of the learning rates of all applied steps so far.
    """

    record: dict
    lr_sum: float


class ShannonControl(L.Callback):
    """Has the loop count every optimizer step, and makes its ticks known.

    Args:
        controller: the law.
        every: applied optimizer steps between ticks.
        stopwatch: for tokens per second.
        record: takes each tick's record on rank 0.
        monitor: adds throughput, MFU and the device's state to the records.
        listeners: are told of each tick, in this order, when its record is written: the ``ControlTick``, the Trainer
            and the module are given to their ``on_tick``.
        drift: measures drift for the law, in the place of a measurement of S; lambda then multiplies drift.
    """

    def __init__(
        self,
        controller: Controller,
        every: int,
        stopwatch: Stopwatch,
        record: Callable[[dict], None] = lambda r: None,
        monitor: Monitor | None = None,
        listeners: Sequence[Any] = (),
        drift: Callable[[Measurement], Measurement] | None = None,
    ) -> None:
        self.loop = ControlLoop(controller, every, drift)
        self.stopwatch, self.record, self.monitor, self.listeners = stopwatch, record, monitor, listeners

    def on_train_start(self, trainer: L.Trainer, module: GraniteModule) -> None:
        self.loop.start(module, trainer.global_step)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: GraniteModule, optimizer: Any) -> None:
        # Taken here, because at the end of the batch the scheduler has moved on to the next step's.
        self.loop.rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: L.Trainer, module: GraniteModule, *_: Any) -> None:
        if trainer.global_step == self.loop.step:  # a micro-batch inside an accumulation window
            return
        if self.loop.after_step(module, trainer.global_step):
            self.tick(trainer, module)
        self._check_failure()

    def on_train_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if self.loop.unread:
            self.tick(trainer, module)
        self._check_failure()

    def tick(self, trainer: L.Trainer, module: GraniteModule) -> None:
        """Let the loop act, and log."""
        window, record = self.loop.tick(module), self.loop.latest
        record |= self._rates(window)
        if trainer.is_global_zero:
            self.record(record)
        scalars = {f"scu/{name}": value for name, value in record.items() if isinstance(value, float | int)}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=self.loop.step)
        for listener in self.listeners:
            listener.on_tick(ControlTick(record, self.loop.lr_sum), trainer, module)

    def _rates(self, window: Window) -> dict[str, Any]:
        rate = self.stopwatch.rate(self.loop.tokens)
        steps, seconds = window.applied + window.skipped, window.tokens / rate if rate else 0.0
        return {"tokens_per_s": rate, **(self.monitor.read(steps, seconds) if self.monitor else {})}

    def _check_failure(self) -> None:
        if self.loop.failure:
            raise Diverged(
                f"{self.loop.failure}; lower --learning-rate, or use --precision fp32 to find the cause (fp16 has no "
                "number above 65,504)"
            )

    def state_dict(self) -> dict[str, Any]:
        return self.loop.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loop.restore(state)


def rests_at(record: dict, bound: float) -> bool:
    """Whether lambda rests at a bound, to a rounding."""
    return record["saturated"] and math.isclose(record["lambda"], bound, rel_tol=1e-9)


def penalty_share(record: dict) -> float:
    """Norm of the penalty's gradient over that of the data's, of the newest step; 0 where either is missing."""
    data = record["data_grad_norm"]
    share = record["penalty_grad_norm"] / data if data > 0 else 0.0
    return share if share < float("inf") else 0.0
