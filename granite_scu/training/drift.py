"""The module as what general text is read with, and drift is anchored by."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from granite_scu.model.drift import Trained
from granite_scu.training.module import LOSS_UNIT, GraniteModule


def trained(module: GraniteModule) -> Trained:
    """What drift needs of the module, its model in place, at any step of the run."""
    trainer = module.trainer
    return Trained(
        module.language_model,
        module.factors,
        partial(as_it_began, module),
        trainer.precision_plugin.forward_context,
        partial(trainer.strategy.reduce, reduce_op="sum"),
        (module.global_rank, trainer.world_size),
        partial(_unit, module),
    )


@contextmanager
def as_it_began(module: GraniteModule) -> Iterator[None]:
    """The model as training began: without its adapter, or with the one that training started from."""
    with module.at_start() if module.start else module.model.disable_adapter():
        yield


def _unit(module: GraniteModule) -> Tensor:
    """As in training: fp16's gradients vanish without the scale, and overflow at one that accumulation has let grow."""
    unit = torch.full((), 1 / (LOSS_UNIT * module.trainer.accumulate_grad_batches), device=module.device)
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    return scaler.scale(unit) if scaler else unit
