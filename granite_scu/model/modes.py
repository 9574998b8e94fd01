"""Modes that a model is in for a while: evaluation, without dropout, not compiled."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn


def not_compiled() -> AbstractContextManager:
    """Run what is compiled as it is. Validation differs from training in grad mode and in the size of its last batch,
    and each would be compiled again, for minutes, to save seconds."""
    return torch.compiler.set_stance("force_eager")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout and compilation inside, and back in the mode it was in outside."""
    training = model.training
    model.eval()
    try:
        with not_compiled():
            yield
    finally:
        model.train(training)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model's dropout layers off, for as long as the context lasts."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Dropout) and layer.training]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()
