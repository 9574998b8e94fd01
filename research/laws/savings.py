"""What the adapter saves on held-out text and on the training text that is next, as it is and scaled down."""

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import lightning as L
from peft.helpers import rescale_adapter_scale
from torch import Tensor

from granite_scu.data.datamodule import TextDataModule
from granite_scu.training.module import GraniteModule
from research.laws.cascade import PROBED_SCALE, AdapterBenefit


class Savings(L.Callback):
    """After each validation measures the savings, in bits per token, for the law to see at its next tick.

    The validation itself has scored the adapter as it is. Scaled down it is scored on the same text, another
    validation each time, and the base model once. The training text is new each time: as many blocks as a validation
    has, to a batch, scored three times before they are trained on.
    """

    def __init__(self) -> None:
        self._base: float | None = None
        self._new: dict[str, float] = {}

    def on_validation_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if trainer.state.fn == "fit":
            self._new = {f"saved_{name}": bits for name, bits in self._measure(trainer, module)._asdict().items()}

    def read(self, module: GraniteModule) -> dict[str, float]:
        """``saved_`` and the names of ``AdapterBenefit``, of a validation since the last tick."""
        found, self._new = self._new, {}
        return found

    def state(self) -> dict[str, Any]:
        return {"new": self._new}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._new = dict(state["new"])

    def _measure(self, trainer: L.Trainer, module: GraniteModule) -> AdapterBenefit:
        n_batches = trainer.num_val_batches[0]
        held_out = lambda: islice(trainer.val_dataloaders, n_batches)  # noqa: E731
        if self._base is None:
            self._base = _base(module, held_out())
        adapted = module.val_bpt
        data: TextDataModule = trainer.datamodule
        per_batch = (data.config.eval_batch_size or data.config.batch_size) / data.config.batch_size
        ahead = data.served()
        ahead.start_batch = module.micro_batches
        upcoming = list(islice(ahead.train_dataloader(), math.ceil(n_batches * per_batch)))
        base = _base(module, upcoming)
        return AdapterBenefit(
            held_out=self._base - adapted,
            held_out_scaled=self._base - _scaled(module, held_out()),
            training=base - module.score(upcoming).bits_per_token,
            training_scaled=base - _scaled(module, upcoming),
        )


def _base(module: GraniteModule, batches: Iterable[dict[str, Tensor]]) -> float:
    with module.model.disable_adapter():
        return module.score(batches).bits_per_token


def _scaled(module: GraniteModule, batches: Iterable[dict[str, Tensor]]) -> float:
    with rescale_adapter_scale(module.model, PROBED_SCALE):
        return module.score(batches).bits_per_token
