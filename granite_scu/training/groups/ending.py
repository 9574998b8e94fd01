"""What may end a run before its last step."""

from typing import NamedTuple

from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from granite_scu.control.diagnostics.equilibrium import Equilibrium
from granite_scu.training.callbacks.equilibrium import EquilibriumStop
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.trainer import TimeLimit


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


class Ending(NamedTuple):
    """The most telling reason first: the time may also run out after another one, in the last validation."""

    equilibrium: EquilibriumStop | None
    patience: OwnPatience | None
    limit: TimeLimit | None


def ending(run: PreparedRun) -> Ending:
    """The callbacks that stop a run."""
    asked, max_time = run.request.run, run.request.trainer["max_time"]
    window, every = asked.stop_at_equilibrium, run.request.control.every
    return Ending(
        EquilibriumStop(Equilibrium(run.setpoint, window), every) if window else None,
        OwnPatience("val_bpt", patience=asked.early_stopping) if asked.early_stopping else None,
        TimeLimit(max_time) if max_time else None,
    )
