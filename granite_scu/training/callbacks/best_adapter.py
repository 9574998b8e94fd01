"""Keep the adapter that validated best until the run ends with it."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import lightning as L
from safetensors.torch import load_file

from granite_scu.model.drift import MARGIN
from granite_scu.storage.atomic import replacing
from granite_scu.storage.checkpoint import save_adapter
from granite_scu.storage.run_folder import ADAPTER_CONFIG, WEIGHTS, finite, read_json
from granite_scu.training.module import GraniteModule

RECORD = "validation.json"
"""What the adapter beside it scored, and when: ``val_bpt``, ``step`` and, with a budget, ``drift``."""


class BestAdapter(L.Callback):
    """After each validation that beats those before, saves the adapter into ``folder``.

    The record to beat is what the folder holds, adapter and score written as one. A checkpoint has a copy of the
    folder of that time, and not the record alone: one copy cannot disagree with the adapter that it is about.

    With a budget of drift one within it beats all that are not, and of these the nearest is the best.

    Args:
        folder: ``best/`` of the run folder. It is there while the run trains.
        budget: the largest share of drift that is asked for, if any.
        steered: the share of drift as the loop has it; where there is a budget.
    """

    def __init__(
        self,
        folder: Path,
        budget: float | None = None,
        steered: Callable[[], float] | None = None,
    ) -> None:
        self.folder, self.budget, self._steered = folder, budget, steered
        self.drift: float | None = None
        self.val_bpt: float | None = None
        self.step: int | None = None
        self.latest: float | None = None
        self.latest_step: int | None = None

    def resume(self, copy: Path, write: bool) -> None:
        """Continue with a checkpoint's copy; without one there is nothing to beat. Every rank calls this.

        Args:
            copy: ``best/`` of the checkpoint.
            write: whether this rank makes ``folder`` agree: on rank 0.
        """
        record = read_json(copy / RECORD) if (copy / RECORD).is_file() else None
        self.val_bpt, self.step = (record["val_bpt"], record["step"]) if record else (None, None)
        self.drift = record.get("drift") if record else None
        if record and self.budget is not None and self.drift is None:
            self.drift = math.inf  # it was not finite
        if not write:
            return
        if record:
            with replacing(self.folder) as temporary:
                temporary.mkdir()  # not copytree, which copies that nobody may write there
                for name in (WEIGHTS, ADAPTER_CONFIG, RECORD):  # whatever else a stranger's has may be a link
                    shutil.copyfile(copy / name, temporary / name)
        elif self.folder.is_dir():
            shutil.rmtree(self.folder)

    def on_validation_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if trainer.state.fn == "fit":
            self.consider(trainer, module, module.val_bpt)

    def consider(self, trainer: L.Trainer, module: GraniteModule, val_bpt: float) -> None:
        """Take note of a validation of the adapter as it is now; save it if none was better.

        One whose score is not finite is never saved.
        """
        self.latest, self.latest_step = val_bpt, trainer.global_step
        self.take(trainer, module, val_bpt, self._steered() if self._steered else None, trainer.global_step)

    def take(self, trainer: L.Trainer, module: GraniteModule, val_bpt: float, drift: float | None, step: int) -> bool:
        """Whether no adapter before is better than that in the model, of this step, which validates and drifts so; if
        so, save it."""
        better = self._in_question(val_bpt) and (
            self.val_bpt is None or self._rank(val_bpt, drift) < self._rank(self.val_bpt, self.drift)
        )
        if better:
            self.val_bpt, self.step, self.drift = val_bpt, step, drift
            if trainer.is_global_zero:
                self._save(module)
        return better

    @property
    def missed_the_latest(self) -> bool:
        """Whether the latest adapter validated better than the one that is kept, or none is within the budget."""
        return self.latest is not None and self._in_question(self.latest)

    def _in_question(self, val_bpt: float) -> bool:
        """Whether an adapter that validates so may be the best: the best so far does not, or is above the budget."""
        if self.val_bpt is None or not math.isfinite(val_bpt):
            return math.isfinite(val_bpt)
        return val_bpt < self.val_bpt or self._rank(self.val_bpt, self.drift)[0] > 0

    def _rank(self, val_bpt: float, drift: float | None) -> tuple[float, float]:
        """By which adapters are compared: how far above the budget, and then how they validate; less is better."""
        above = 0.0 if drift is None or self.budget is None else max(drift - MARGIN * self.budget, 0.0)  # NaN stays
        return (above if math.isfinite(above) else math.inf), val_bpt

    def restore(self, trainer: L.Trainer, module: GraniteModule) -> None:
        """Give the model the adapter that validated best. Every rank calls this; rank 0 alone has the folder."""
        weights = load_file(self.folder / WEIGHTS) if trainer.is_global_zero else {}
        module.load_adapter(trainer.strategy.broadcast(weights))

    def _save(self, module: GraniteModule) -> None:
        drift = {} if self.drift is None else {"drift": self.drift}
        record = finite({"val_bpt": self.val_bpt, "step": self.step, **drift})
        with replacing(self.folder) as temporary:
            save_adapter(module.model, temporary, module.base.name)
            (temporary / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")

    def state_dict(self) -> dict:
        return {"latest": self.latest, "latest_step": self.latest_step}

    def load_state_dict(self, state: dict) -> None:
        self.latest, self.latest_step = state["latest"], state["latest_step"]
