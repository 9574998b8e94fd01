"""Keep the adapter that validated best beside the final one."""

from pathlib import Path

import lightning as L

from granite_scu.checkpoint import save_adapter
from granite_scu.module import GraniteModule
from granite_scu.run_folder import replacing


class BestAdapter(L.Callback):
    """After each validation that beats those before, saves the adapter into ``folder``.

    Args:
        folder: ``best/`` of the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.val_bpt: float | None = None
        self.step: int | None = None
        self.latest: float | None = None
        self.latest_step: int | None = None

    def on_validation_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if trainer.state.fn == "fit":
            self.consider(trainer, module, float(trainer.callback_metrics["val_bpt"]))

    def consider(self, trainer: L.Trainer, module: GraniteModule, val_bpt: float) -> None:
        """Take note of a validation of the adapter as it is now; save it if none was better."""
        self.latest, self.latest_step = val_bpt, trainer.global_step
        if self.val_bpt is None or val_bpt < self.val_bpt:
            self.val_bpt, self.step = val_bpt, trainer.global_step
            if trainer.is_global_zero:
                with replacing(self.folder) as temporary:
                    save_adapter(module.model, temporary, module.base.name)

    def state_dict(self) -> dict:
        return {"val_bpt": self.val_bpt, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.val_bpt, self.step = state["val_bpt"], state["step"]
