"""What a callback is that looks at every tick of the control loop."""

import lightning as L

from granite_scu.training.callbacks.shannon_control import ShannonControl


class AfterTick(L.Callback):
    """Calls ``on_tick`` once after every tick, the one at the end of the run among them. Comes after ``control``.

    Args:
        control: the callback that ticks.
    """

    def __init__(self, control: ShannonControl) -> None:
        self.control = control
        self._seen: int | None = None

    def on_tick(self, trainer: L.Trainer, module: L.LightningModule, record: dict) -> None:
        """Called with the tick's record, the same on every rank but for the times in it."""
        raise NotImplementedError

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._seen = self.control.latest.get("step")  # of a run that goes on, the checkpoint's: it was looked at then

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_) -> None:
        self._look(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._look(trainer, module)

    def _look(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        record = self.control.latest
        if record and record["step"] != self._seen:
            self._seen = record["step"]
            self.on_tick(trainer, module, record)


def penalty_share(record: dict) -> float:
    """Norm of the penalty's gradient over that of the data's, of the newest step; 0 where either is missing."""
    data = record["data_grad_norm"]
    share = record["penalty_grad_norm"] / data if data > 0 else 0.0
    return share if share < float("inf") else 0.0
