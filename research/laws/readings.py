"""What several sensors need of a run: bits by token, over all processes."""

import math

import torch
from torch import Tensor

from granite_scu.model.description_length import bits
from granite_scu.training.module import GraniteModule


def per_token(module: GraniteModule, nats: Tensor, tokens: Tensor) -> float:
    """A sum over a batch, over all processes, by supervised token and in bits; NaN where there is no such token."""
    total, count = module.reduced(torch.stack([nats.double(), tokens])).tolist()
    return bits(total / count) if count else math.nan
