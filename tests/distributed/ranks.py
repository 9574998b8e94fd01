"""A callback by which each process of a run says what it saw."""

import json
from pathlib import Path

import lightning as L

from granite_scu.training.callbacks.shannon_control import ShannonControl


class WriteSetpoints(L.Callback):
    """Writes S* and lambda after each step, as the process has them, into a file of the process's number."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen = Path(folder), []

    def on_train_batch_end(self, trainer: L.Trainer, *_) -> None:
        (loop,) = (callback.loop for callback in trainer.callbacks if isinstance(callback, ShannonControl))
        self.seen.append([loop.latest.get("s_target"), loop.action.reg_strength])

    def on_train_end(self, trainer: L.Trainer, *_) -> None:
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(self.seen), encoding="utf-8")
