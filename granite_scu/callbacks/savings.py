"""What the adapter saves on text that it has trained on and on held-out text, in bits per token."""

from collections.abc import Iterable
from itertools import islice

import lightning as L
from torch import Tensor

from granite_scu.callbacks.scu import ShannonControl
from granite_scu.evaluation import score
from granite_scu.module import GraniteModule

MICRO_BATCHES = 4
"""The first micro-batches of each rank stand for the training text. They are trained on from the start: text that is
still to come would count as held out."""


class Savings(L.Callback):
    """After each validation measures the savings and hands them to ``control`` for its next tick.

    The base model is scored once, with the adapters switched off; what is saved is measured against it on the same
    tokens, so the texts' own difficulty cancels. It costs a forward pass over ``MICRO_BATCHES`` at each validation.

    Args:
        control: the callback that ticks.
    """

    def __init__(self, control: ShannonControl) -> None:
        self.control = control
        self.sample: list[dict[str, Tensor]] = []
        self._base: tuple[float, float] | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: GraniteModule, batch: dict, index: int) -> None:
        if len(self.sample) < MICRO_BATCHES:
            self.sample.append({name: tensor.clone() for name, tensor in batch.items()})

    def on_validation_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if trainer.state.fn != "fit" or not self.sample:
            return
        if self._base is None:
            validation = islice(trainer.val_dataloaders, trainer.num_val_batches[0])
            with module.model.disable_adapter():
                self._base = _bits(trainer, module, self.sample), _bits(trainer, module, validation)
        training, held_out = self._base
        self.control.saved = (
            training - _bits(trainer, module, self.sample),
            held_out - float(trainer.callback_metrics["val_bpt"]),
        )

    def state_dict(self) -> dict:
        return {"sample": self.sample}

    def load_state_dict(self, state: dict) -> None:
        self.sample = state["sample"]


def _bits(trainer: L.Trainer, module: GraniteModule, batches: Iterable[dict[str, Tensor]]) -> float:
    context = trainer.precision_plugin.forward_context()
    return score(module, batches, model=module, reduce=module.reduced, context=context).bits_per_token
