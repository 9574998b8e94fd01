"""Checkpoints every so many optimizer steps, of which the last few are kept."""

from pathlib import Path
from typing import Any

import lightning as L

from granite_scu.storage import checkpoint_list
from granite_scu.storage.run_folder import RunFolder
from granite_scu.training.callbacks.throughput import Stopwatch
from granite_scu.training.module import GraniteModule


class Checkpoints(L.Callback):
    """Saves ``checkpoint-<step>`` every ``save_steps`` steps and at the end. Comes after all that has a state.

    Where a step is validated, its checkpoint is saved after that: what a validation decides is part of the state. One
    that had to be saved before says so, and the run that continues from it validates first. While steps are not finite
    it is not saved: it would push out those from before the weights went wrong.

    Args:
        folder: the run folder.
        save_steps: optimizer steps between checkpoints.
        eval_steps: optimizer steps between validations; None where there are none.
        keep: how many are kept, the newest.
        stopwatch: stands still meanwhile.
        settings: what the run depends on, to compare when it is continued from the checkpoint.
    """

    def __init__(
        self,
        folder: RunFolder,
        save_steps: int,
        eval_steps: int | None,
        keep: int,
        stopwatch: Stopwatch,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.save_steps, self.eval_steps, self.keep = folder, save_steps, eval_steps, keep
        self.stopwatch, self.settings = stopwatch, settings or {}
        self._saved = 0
        self._elsewhere = False  # what it continues from is in another run's folder
        self._validated = 0  # the last step that was
        self._owed = False
        self.ended = False
        """Whether Lightning has said that training is over."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._saved = trainer.global_step
        continued = trainer.ckpt_path
        self._elsewhere = bool(continued) and Path(str(continued)).resolve().parent != self.folder.path.resolve()
        if self._owed and trainer.global_step < trainer.max_steps:
            # Lightning takes a validation that was due at the checkpoint's step for done.
            trainer.validating = True
            validation = trainer.fit_loop.epoch_loop.val_loop
            validation.restarting = False  # it may have been cut between two batches, and a mean needs them all
            validation.run()
            trainer.training = True
        self._owed = False

    def on_train_batch_end(self, trainer: L.Trainer, module: GraniteModule, *_) -> None:
        if self._is_due(trainer) and not self._validation_due(trainer) and module.latest_step_was_finite:
            self._save_between_steps(trainer)

    def on_validation_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        self._validated = trainer.global_step
        if trainer.state.fn == "fit" and self._is_due(trainer) and module.latest_step_was_finite:
            self._save_between_steps(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.save(trainer)
        self.ended = True

    def save(self, trainer: L.Trainer) -> None:
        """Have a checkpoint of this step, and drop what is more than ``keep``."""
        if trainer.global_step == self._saved and not self._elsewhere:
            return
        if trainer.is_global_zero:
            self.folder.sync_history()
        trainer.save_checkpoint(self.folder.path / f"checkpoint-{trainer.global_step}")
        if trainer.is_global_zero:
            checkpoint_list.prune(self.folder, self.keep)
        self._saved, self._elsewhere = trainer.global_step, False

    def _save_between_steps(self, trainer: L.Trainer) -> None:
        self.stopwatch.stop()
        self.save(trainer)
        self.stopwatch.start()

    def _is_due(self, trainer: L.Trainer) -> bool:
        """Whether a multiple of ``save_steps`` has been reached, or passed by steps that were not finite."""
        return trainer.global_step // self.save_steps > self._saved // self.save_steps

    def _validation_due(self, trainer: L.Trainer) -> bool:
        step = trainer.global_step
        return self.eval_steps is not None and step % self.eval_steps == 0 and step != self._validated

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["settings"] = self.settings
        checkpoint["validation_due"] = self._validation_due(trainer)
        checkpoint["stopping"] = trainer.should_stop

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._owed = checkpoint["validation_due"]
        trainer.should_stop = has_ended(checkpoint, self.settings)


def has_ended(checkpoint: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a checkpoint is of a run that had itself stopped, and of these settings: with others it continues.

    The model may have another path: it is compared by its weights. Of the checkpoint's settings those count that are
    still compared.
    """
    before = checkpoint["settings"]
    same = all(before.get(name) == value for name, value in settings.items() if name != "--model")
    return checkpoint["stopping"] and same
