"""What the adapter saves on held-out text, as it is and scaled down."""

from itertools import islice

import lightning as L
from peft.helpers import rescale_adapter_scale

from granite_scu.callbacks.scu import ShannonControl
from granite_scu.control.cascade import PROBED_SCALE
from granite_scu.evaluation import score
from granite_scu.module import GraniteModule


class Savings(L.Callback):
    """After each validation measures the savings, in bits per token, and hands them to ``control`` for its next tick.

    The validation itself has scored the adapter as it is. The adapter scaled down is scored on the same text, another
    validation each time, and the base model once.

    Args:
        control: the callback that ticks.
    """

    def __init__(self, control: ShannonControl) -> None:
        self.control = control
        self._base: float | None = None

    def on_validation_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if trainer.state.fn != "fit":
            return
        if self._base is None:
            with module.model.disable_adapter():
                self._base = _validate(trainer, module)
        with rescale_adapter_scale(module.model, PROBED_SCALE):
            scaled = _validate(trainer, module)
        self.control.saved = self._base - float(trainer.callback_metrics["val_bpt"]), self._base - scaled


def _validate(trainer: L.Trainer, module: GraniteModule) -> float:
    """Bits per token on the run's validation sample, over all ranks."""
    batches = islice(trainer.val_dataloaders, trainer.num_val_batches[0])
    context = trainer.precision_plugin.forward_context()
    return score(module, batches, model=module, reduce=module.reduced, context=context).bits_per_token
