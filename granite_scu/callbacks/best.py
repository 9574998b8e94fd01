"""Keep the adapter that validated best beside the final one."""

import json
import shutil
from pathlib import Path

import lightning as L

from granite_scu.checkpoint import save_adapter
from granite_scu.module import GraniteModule
from granite_scu.run_folder import finite, replacing

RECORD = "validation.json"
"""What the adapter beside it scored, and at which step: ``val_bpt`` and ``step``."""


class BestAdapter(L.Callback):
    """After each validation that beats those before, saves the adapter into ``folder``.

    The record to beat is what the folder holds, adapter and score written as one. It is in no checkpoint:
    one copy cannot disagree with the adapter that it is about.

    Args:
        folder: ``best/`` of the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.val_bpt: float | None = None
        self.step: int | None = None
        self.latest: float | None = None
        self.latest_step: int | None = None

    def resume(self, from_folder: Path, step: int, write: bool) -> None:
        """Take over the record of the run that goes on at ``step``; one from after that step is discarded.

        The steps after the checkpoint are done again, and then their validations decide. Every rank calls this;
        one that reads while rank 0 removes finds no record, which is the same as a discarded one.

        Args:
            from_folder: ``best/`` of the run that the checkpoint belongs to; may be ``folder``.
            step: of the checkpoint.
            write: whether this rank makes ``folder`` agree: on rank 0.
        """
        record = _read(from_folder)
        holds = record is not None and record["step"] <= step
        self.val_bpt, self.step = (record["val_bpt"], record["step"]) if holds else (None, None)
        if write:
            self._take_over(from_folder) if holds else self._discard()

    def on_validation_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if trainer.state.fn == "fit":
            self.consider(trainer, module, float(trainer.callback_metrics["val_bpt"]))

    def consider(self, trainer: L.Trainer, module: GraniteModule, val_bpt: float) -> None:
        """Take note of a validation of the adapter as it is now; save it if none was better."""
        self.latest, self.latest_step = val_bpt, trainer.global_step
        if self.val_bpt is None or val_bpt < self.val_bpt:
            self.val_bpt, self.step = val_bpt, trainer.global_step
            if trainer.is_global_zero:
                self._save(module)

    def _save(self, module: GraniteModule) -> None:
        record = finite({"val_bpt": self.val_bpt, "step": self.step})
        with replacing(self.folder) as temporary:
            save_adapter(module.model, temporary, module.base.name)
            (temporary / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")

    def _take_over(self, source: Path) -> None:
        if source.resolve() != self.folder.resolve():
            with replacing(self.folder) as temporary:
                shutil.copytree(source, temporary)

    def _discard(self) -> None:
        if self.folder.is_dir():
            shutil.rmtree(self.folder)


def _read(folder: Path) -> dict | None:
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
