"""The live line, and the lines that remain where there is no terminal."""

import logging
import time
from collections.abc import Callable

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from granite_scu.config.progress import LIVE, Heartbeat, NotebookLine, in_notebook
from granite_scu.control.units import per_cent
from granite_scu.training.callbacks.shannon_control import ControlTick

log = logging.getLogger(__name__)


class ProgressLine(L.Callback):
    """One line: steps, loss, drift, S against S*, lambda, tokens a second, MFU, the GPU's memory, sensors, time left.

    On a terminal and in a notebook it is redrawn in place; elsewhere, and in the log file, a line is written every
    ``logging_steps`` optimizer steps, at the next tick, and a short one where that takes more than a minute.

    What is left is of the whole run once it has validated: its steps, its validations at the seconds that the last one
    took, and the scores at its end. Questions come after that, in a time that the plan states.

    Args:
        logging_steps: optimizer steps between written lines.
        console: where the live line goes.
        validations: how many there are after so many steps are done.
        scored: what is scored at the end, in validations.
    """

    def __init__(self, logging_steps: int, console: Console, validations: Callable[[int], int], scored: float) -> None:
        self.logging_steps, self.console = logging_steps, console
        self._validations, self._scored = validations, scored
        self._validating = self._validation = 0.0
        self._latest: dict | None = None
        self._progress: Progress | None = None
        self._line = NotebookLine() if in_notebook() and not console.quiet else None
        self._written = self._shown = self._first = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._written = self._shown = self._first = trainer.global_step
        self._heartbeat = Heartbeat(trainer.max_steps, trainer.global_step)
        if trainer.is_global_zero and trainer.global_step < trainer.max_steps:
            log.info("training", extra={LIVE: True})
        if trainer.is_global_zero and self.console.is_terminal:
            text = TextColumn("{task.description}")
            self._progress = Progress(
                TextColumn("training"), MofNCompleteColumn(), BarColumn(20), text, console=self.console
            )
            self._task = self._progress.add_task("", total=trainer.max_steps, completed=self._shown)
            self._progress.start()

    def on_tick(self, tick: ControlTick, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._latest = tick.record

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_) -> None:
        step = trainer.global_step
        if step == self._shown:
            return
        self._shown = step
        if step == self._first + 1:  # in the first step layers are compiled
            self._heartbeat.start_pace(step)
        record = self._latest
        text = describe(record) if record else ""
        left = self._heartbeat.left(step, self.besides(step))
        if self._progress:
            self._progress.update(self._task, completed=step, description="  ".join(filter(None, [text, left])))
        if self._line and trainer.is_global_zero:
            now = "  ".join(filter(None, [f"step {step}/{trainer.max_steps}", text, left]))
            self._line.show(now, at_once=step == trainer.max_steps)
        fresh = bool(record) and record["step"] == step and step - self._written >= self.logging_steps
        if not (fresh or self._heartbeat.is_due()):
            return
        self._written = step if fresh else self._written
        self._heartbeat.beat()
        if trainer.is_global_zero:
            parts = [f"step {step}/{trainer.max_steps}", text if fresh else "", left]
            log.info("%s", "  ".join(filter(None, parts)), extra={LIVE: True})

    def besides(self, step: int) -> float:
        """Seconds that validations and the scores will take, as far as known when a step is over."""
        # That of the step itself, if there is one, comes after its line.
        return (self._validations(step - 1) + self._scored) * self._validation

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._validating = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._validation = time.monotonic() - self._validating
        self._heartbeat.set_aside(self._validation)
        if trainer.is_global_zero:
            log.info("step %d  validation %.4f bits/token", trainer.global_step, module.val_bpt)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None


def describe(record: dict) -> str:
    """A tick's record in one short line: of S where it is held or weighed, lambda where anything is."""
    parts = [f"loss {record['data_bpt']:.3f} bits/token"]
    if record.get("drift") is not None:
        parts.append(f"drift {per_cent(record['drift'])} (at most {per_cent(record['drift_target'])})")
    elif record["lambda"]:
        smoothed = record["s_ema"] if record["s_ema"] is not None else record["s"]
        target = f" (S* {record['s_target']:.2%})" if record["s_target"] is not None else ""
        parts.append(f"S {smoothed:.2%}{target}")
    if record["lambda"]:
        flags = "".join(f" {name}" for name in ("saturated", "held") if record[name])
        parts.append(f"lambda {record['lambda']:.3g}{flags}")
    parts.append(f"{record['tokens_per_s']:,.0f} tok/s")
    return "  ".join(parts + _device(record))


def _device(record: dict) -> list[str]:
    """The MFU, memory (now, peak, total) and sensors of a GPU, as far as known.

    MFU on a CPU is in the history alone: it is a share of a rate measured there, which tells a user nothing.
    """
    parts = []
    if record.get("gpu_memory_gb") is not None:
        parts += [] if record.get("mfu") is None else [f"mfu {record['mfu']:.1%}"]
        memory = (record[f"gpu_memory_{name}"] for name in ("now_gb", "gb", "total_gb"))
        parts.append("/".join(f"{value:.1f}" for value in memory) + " GiB")
    for name, unit in (("gpu_utilisation", " %"), ("gpu_temperature_c", " C"), ("gpu_power_w", " W")):
        if record.get(name) is not None:
            parts.append(f"{record[name]:.0f}{unit}")
    return parts
