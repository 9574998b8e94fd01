"""Checkpoints every so many optimizer steps, of which the last few are kept."""

import shutil

import lightning as L

from granite_scu.callbacks.stopwatch import Stopwatch
from granite_scu.run_folder import RunFolder


class Checkpoints(L.Callback):
    """Saves ``checkpoint-<step>`` every ``save_steps`` steps and at the end.

    Args:
        folder: the run folder.
        save_steps: optimizer steps between checkpoints.
        keep: how many are kept, the newest.
        stopwatch: stands still meanwhile.
    """

    def __init__(self, folder: RunFolder, save_steps: int, keep: int, stopwatch: Stopwatch) -> None:
        self.folder, self.save_steps, self.keep, self.stopwatch = folder, save_steps, keep, stopwatch
        self._saved = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._saved = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_) -> None:
        step = trainer.global_step
        if step != self._saved and step % self.save_steps == 0:
            self.stopwatch.stop()
            self.save(trainer)
            self.stopwatch.start()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step != self._saved:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Save now, and drop what is more than ``keep``."""
        self._saved = trainer.global_step
        trainer.save_checkpoint(self.folder.path / f"checkpoint-{trainer.global_step}")
        if trainer.is_global_zero:
            for old in self.folder.checkpoints()[: -self.keep]:
                shutil.rmtree(old)
