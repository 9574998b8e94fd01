"""Early stopping with the patience that it was given, and not that of a checkpoint."""

from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason


class OwnPatience(EarlyStopping):
    """Lightning's, which would have a continued run keep the patience that it began with."""

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    def on_train_batch_start(self, *_) -> None:
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED  # a run that makes another step continues

    @property
    def stop_reason(self) -> str | None:
        """Why this ended the run; None where it did not."""
        return None if self.stopping_reason is EarlyStoppingReason.NOT_STOPPED else "early_stopping"
