"""The end of a run: leave the best validated adapter, score it and the base on held-out documents, summarise."""

import math
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console

from granite_scu.config.errors import Diverged
from granite_scu.config.progress import tracked
from granite_scu.control.diagnostics.metrics import summarise
from granite_scu.evaluation.score import Score
from granite_scu.model.drift import Drift
from granite_scu.storage.atomic import replacing
from granite_scu.storage.checkpoint import save_adapter
from granite_scu.storage.run_folder import LAST_ADAPTER, RunFolder
from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.drift import DriftMeter
from granite_scu.training.callbacks.reachability import ReachabilityMonitor
from granite_scu.training.callbacks.throughput import Monitor, Stopwatch
from granite_scu.training.module import GraniteModule


class FinalScore(L.Callback):
    """Writes the adapter that validated best, the history as one list, and ``scu_metrics.json``.

    Where that adapter is not the one of the last step, or is that scaled, the last one goes into ``final/``.

    Args:
        folder: the run folder.
        console: for the progress of the scoring.
        best: the callback that kept the best validated adapter.
        stopwatch: for the training time.
        monitor: sums up throughput and MFU.
        setpoint: that S is judged by; None where there was none, or where the controller moved it.
        reachability: what watched whether the setpoint can be reached; None where nothing holds one.
        stoppers: what may have ended the run, the most telling first; ``stop_reason`` of each is None if it did not.
        drift: measures how far the kept adapter has drifted on general text; None does not.
    """

    def __init__(
        self,
        folder: RunFolder,
        console: Console,
        best: BestAdapter,
        stopwatch: Stopwatch,
        monitor: Monitor,
        setpoint: float | None,
        reachability: ReachabilityMonitor | None = None,
        stoppers: Sequence[Any] = (),
        drift: DriftMeter | None = None,
    ) -> None:
        self.drift = drift
        self.folder, self.console = folder, console
        self.best, self.stopwatch, self.monitor = best, stopwatch, monitor
        self.setpoint, self.reachability, self.stoppers = setpoint, reachability, stoppers
        self.summary: dict = {}

    def on_train_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        self.stopwatch.stop()
        data = trainer.datamodule
        drift = None
        if data.holds_out("validation"):
            self.validate_last_step(trainer, module)
            drift = self._fit_budget(trainer, module, self.drift) if self.drift else None
        elif self.drift:
            drift = self._scale_last(trainer, module, self.drift)
        self._keep_best(trainer, module)
        scores = self._scores(trainer, module) if data.holds_out("test") else {}
        if trainer.is_global_zero:
            self.summary = self._summarise(trainer, scores, drift)
            self.folder.write_json("scu_metrics.json", self.summary)
            shutil.rmtree(self.best.folder, ignore_errors=True)

    def _scores(self, trainer: L.Trainer, module: GraniteModule) -> dict:
        """What the test text costs under the adapter, the base model and the adapter that training started from.

        Raises:
            Diverged: the adapter or the base model has no finite score.
        """
        adapter = self._score_test(trainer, module, "adapter")
        with module.model.disable_adapter():
            base = self._score_test(trainer, module, "base model")
        for what, score in (("adapter", adapter), ("base model", base)):
            _require_finite(trainer.global_step, what, score.bits_per_token, "test")
        scores = {"base_test_bpt": base.bits_per_token, "adapter_test_bpt": adapter.bits_per_token}
        if module.start:
            with module.at_start():
                start = self._score_test(trainer, module, "adapter at the start")
            scores["start_test_bpt"] = start.bits_per_token
        return scores | {"test_tokens": adapter.tokens}

    def _fit_budget(self, trainer: L.Trainer, module: GraniteModule, meter: DriftMeter) -> Drift:
        """Have what is kept within the budget of drift on text that the loop did not see.

        As much of the best adapter as is within takes its place where it is not, and as much of the last one does so
        where that validates better. The last adapter is in the model before and after.

        Returns:
            drift of the adapter that is kept.
        """
        best, last = self.best, [factor.detach().clone() for factor in module.factors]
        of_best, step = trainer.strategy.broadcast(best.step), trainer.global_step
        if of_best != step:
            best.restore(trainer, module)
        found = meter.read()
        best.drift = found.share
        if not meter.holds(found):
            found = self._fitted(trainer, module, meter, found, of_best) or found
        if of_best != step and trainer.strategy.broadcast(best.missed_the_latest):
            module.put(last)
            found = self._fitted(trainer, module, meter, meter.read(), step) or found
        module.put(last)
        return found

    def _fitted(
        self, trainer: L.Trainer, module: GraniteModule, meter: DriftMeter, found: Drift, step: int
    ) -> Drift | None:
        """Drift of as much of the adapter in the model as is within the budget; None where another is better."""
        if not math.isfinite(found.share):
            return None
        fitted, scale = meter.fit(module, found)
        taken = self.best.take(trainer, module, self._validated(trainer, module), fitted.share, step)
        if not trainer.strategy.broadcast(taken):
            return None
        meter.scale = scale
        return fitted

    def _scale_last(self, trainer: L.Trainer, module: GraniteModule, meter: DriftMeter) -> Drift:
        """Have the last adapter, all that is kept where nothing validates, within the budget of drift.

        Returns:
            its drift.
        """
        found = meter.read()
        if meter.holds(found) or not math.isfinite(found.share):
            return found
        self._save(trainer, module, self.folder.path / LAST_ADAPTER)
        fitted, meter.scale = meter.fit(module, found)
        return fitted

    def _validated(self, trainer: L.Trainer, module: GraniteModule) -> float:
        some = islice(trainer.datamodule.val_dataloader(), int(trainer.limit_val_batches))
        return module.score(some).bits_per_token

    def validate_last_step(self, trainer: L.Trainer, module: GraniteModule) -> None:
        """Validate the adapter of the last step, where none was due there.

        Raises:
            Diverged: it has no finite score.
        """
        if self.best.latest_step != trainer.global_step:
            self.best.consider(trainer, module, self._validated(trainer, module))
        _require_finite(trainer.global_step, "adapter", self.best.latest, "validation")

    def _keep_best(self, trainer: L.Trainer, module: GraniteModule) -> None:
        """Save the adapter that validated best, and have it in the model; the last step's goes beside it."""
        last, scaled = self.folder.path / LAST_ADAPTER, self.drift is not None and self.drift.scale < 1
        best = trainer.strategy.broadcast(self.best.step)
        if best is not None and (scaled or best != trainer.global_step):
            self._save(trainer, module, last)
            self.best.restore(trainer, module)
        elif not scaled and trainer.is_global_zero:
            shutil.rmtree(last, ignore_errors=True)  # of a run that ended here before
        if trainer.is_global_zero:
            save_adapter(module.model, self.folder.path, module.base.name)

    def _save(self, trainer: L.Trainer, module: GraniteModule, folder: Path) -> None:
        if trainer.is_global_zero:
            with replacing(folder) as temporary:
                save_adapter(module.model, temporary, module.base.name)

    def _score_test(self, trainer: L.Trainer, module: GraniteModule, what: str) -> Score:
        loader = trainer.datamodule.test_dataloader()
        shown = trainer.is_global_zero
        return module.score(tracked(loader, f"scoring the {what}", self.console) if shown else loader)

    def _summarise(self, trainer: L.Trainer, scores: dict, drift: Drift | None) -> dict:
        history = self.folder.finish_history()
        last = history[-1] if history else {}
        tokens = last.get("tokens", 0)
        # S is not judged by a setpoint that the controller moved. Where drift was held, that is.
        judged = history if self.setpoint is not None else [record | {"s_target": None} for record in history]
        if "drift" in last:
            judged = [record | {"s_ema": record["drift"], "s_target": record["drift_target"]} for record in history]
        return {
            "steps": trainer.global_step,
            "tokens": tokens,
            "base_test_bpt": None,
            "adapter_test_bpt": None,
            "test_tokens": 0,
            **scores,
            "test_is_validation": trainer.datamodule.config.doubles,
            "final_val_bpt": self.best.latest,
            "best_val_bpt": self.best.val_bpt,
            "best_val_step": self.best.step,
            "train_bpt": last.get("data_bpt"),
            "param_bpt": last.get("param_bpt"),
            "s": last.get("s"),
            "s_ema": last.get("s_ema"),
            "s_target": last.get("s_target"),
            "lambda": last.get("lambda"),
            "skipped_steps": last.get("skipped", 0),
            "train_time_s": self.stopwatch.seconds,
            "wall_time_s": self.stopwatch.wall_seconds,
            "tokens_per_s": tokens / self.stopwatch.seconds if self.stopwatch.seconds else None,
            "peak_gpu_memory_gb": last.get("gpu_memory_gb"),
            **self.monitor.summary(trainer.global_step, self.stopwatch.seconds, history),
            "control": summarise(judged),
            "stopped": {"reason": stop_reason(trainer, self.stoppers), "step": trainer.global_step},
            "reachability": self.reachability.summary() if self.reachability else None,
            **({"drift": self.drift.summary(drift, history)} if self.drift and drift else {}),
        }


def stop_reason(trainer: L.Trainer, stoppers: Sequence[Any]) -> str:
    """Why training ended: max_steps, what the first of the stoppers says that has a reason, or other."""
    if trainer.global_step >= trainer.max_steps:
        return "max_steps"
    return next((reason for stopper in stoppers if (reason := stopper.stop_reason)), "other")


def _require_finite(step: int, what: str, bits: float, split: str) -> None:
    if not math.isfinite(bits):
        raise Diverged(
            f"step {step}: the {what} scores {bits} bits/token on the {split} text; lower --learning-rate, or use "
            "--precision fp32 to find the cause"
        )
