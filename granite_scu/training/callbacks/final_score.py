"""The end of a run: score base and adapter on held-out documents, save, summarise."""

import time
from collections.abc import Iterable
from itertools import islice

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from granite_scu.control.diagnostics.metrics import summarise
from granite_scu.evaluation.score import Score, score
from granite_scu.storage.checkpoint import save_adapter
from granite_scu.storage.run_folder import RunFolder
from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.equilibrium import EquilibriumStop
from granite_scu.training.callbacks.reachability import ReachabilityMonitor
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.stopwatch import Stopwatch
from granite_scu.training.module import GraniteModule


class Finish(L.Callback):
    """Writes the final adapter, the history as one list, and ``scu_metrics.json``.

    Args:
        folder: the run folder.
        control: the callback that ticked.
        best: the callback that kept the best validated adapter.
        stopwatch: for the training time.
        tokenizer: saved beside the adapter.
        console: for the progress of the scoring.

    Attributes:
        reachability: what watches whether the setpoint can be reached; None where nothing steers.
    """

    def __init__(
        self,
        folder: RunFolder,
        control: ShannonControl,
        best: BestAdapter,
        stopwatch: Stopwatch,
        tokenizer: PreTrainedTokenizerBase,
        console: Console,
    ) -> None:
        self.reachability: ReachabilityMonitor | None = None
        self.folder, self.control, self.best, self.stopwatch = folder, control, best, stopwatch
        self.tokenizer, self.console = tokenizer, console
        self.summary: dict = {}
        self._started = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        self.stopwatch.stop()
        if trainer.is_global_zero:
            save_adapter(module.model, self.folder.path, module.base.name)
            self.tokenizer.save_pretrained(self.folder.path)
        data = trainer.datamodule
        if self.best.latest_step != trainer.global_step:
            some = islice(data.val_dataloader(), int(trainer.limit_val_batches))
            self.best.consider(trainer, module, self._score(trainer, module, some).bits_per_token)
        adapter = self._score(trainer, module, self._tracked(trainer, data.test_dataloader(), "adapter"))
        with module.model.disable_adapter():
            base = self._score(trainer, module, self._tracked(trainer, data.test_dataloader(), "base model"))
        start = self._score_start(trainer, module) if module.start else None
        if trainer.is_global_zero:
            self.summary = self._summarise(trainer, base, adapter) | ({"start_test_bpt": start} if start else {})
            self.folder.write_json("scu_metrics.json", self.summary)

    def _score(self, trainer: L.Trainer, module: GraniteModule, batches: Iterable[dict]) -> Score:
        context = trainer.precision_plugin.forward_context()
        return score(module, batches, model=module, reduce=module.reduced, context=context)

    def _score_start(self, trainer: L.Trainer, module: GraniteModule) -> float:
        """Bits per token with the adapter that training started from."""
        batches = self._tracked(trainer, trainer.datamodule.test_dataloader(), "adapter as it was")
        with module.at_start():
            return self._score(trainer, module, batches).bits_per_token

    def _tracked(self, trainer: L.Trainer, loader: DataLoader, what: str) -> Iterable[dict]:
        hidden = not (trainer.is_global_zero and self.console.is_terminal)
        return track(loader, f"scoring the {what}", console=self.console, disable=hidden, transient=True)

    def _judged(self, history: list[dict]) -> list[dict]:
        """The history, without a setpoint where that moved about by itself: there was none to be judged by."""
        moving = self.control.controller.setpoint is None
        return [record | {"s_target": None} for record in history] if moving else history

    def _speed(self, steps: int, history: list[dict]) -> dict:
        monitor = self.control.monitor
        return monitor.summary(steps, self.stopwatch.seconds, history) if monitor else {}

    def _summarise(self, trainer: L.Trainer, base: Score, adapter: Score) -> dict:
        history = self.folder.finish_history()
        last = history[-1] if history else {}
        final_val = self.best.latest
        return {
            "steps": trainer.global_step,
            "tokens": self.control.tokens,
            "base_test_bpt": base.bits_per_token,
            "final_test_bpt": adapter.bits_per_token,
            "test_tokens": adapter.tokens,
            "final_val_bpt": final_val,
            "best_val_bpt": self.best.val_bpt,
            "best_val_step": self.best.step,
            "better": better_of(final_val, self.best.val_bpt),
            "train_bpt": last.get("data_bpt"),
            "param_bpt": last.get("param_bpt"),
            "s": last.get("s"),
            "s_ema": last.get("s_ema"),
            "s_target": last.get("s_target"),
            "lambda": last.get("lambda"),
            "skipped_steps": self.control.skipped,
            "train_time_s": self.stopwatch.seconds,
            "wall_time_s": time.perf_counter() - self._started,
            "tokens_per_s": self.control.tokens / self.stopwatch.seconds if self.stopwatch.seconds else None,
            "peak_gpu_memory_gb": last.get("gpu_memory_gb"),
            **self._speed(trainer.global_step, history),
            "control": summarise(self._judged(history)),
            "stopped": {"reason": stop_reason(trainer), "step": trainer.global_step},
            "reachability": self.reachability.summary() if self.reachability else None,
        }


def better_of(final: float, best: float) -> dict[str, str | float]:
    """Which of the two adapters that a run leaves validated better, and by how many bits per token.

    The final one where they are level: as a rule they are one and the same then.
    """
    return {"adapter": "best" if best < final else "final", "by_bpt": max(0.0, final - best)}


def stop_reason(trainer: L.Trainer) -> str:
    """Why training ended: max_steps, max_time, equilibrium, early_stopping, or other for a callback of the user's."""
    if trainer.global_step >= trainer.max_steps:
        return "max_steps"
    found = {reason for callback in trainer.callbacks if (reason := _reason_of(callback))}
    # The time last: it may also have run out after another reason, in the validation of the last step.
    return next((reason for reason in ("equilibrium", "early_stopping", "max_time") if reason in found), "other")


def _reason_of(callback: L.Callback) -> str | None:
    """Why this callback would have ended the run; None where it would not."""
    if isinstance(callback, EquilibriumStop) and callback.stopped_at is not None:
        return "equilibrium"
    if isinstance(callback, EarlyStopping) and callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
        return "early_stopping"
    if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None and left <= 0:
        return "max_time"
    return None
