"""torch.compile of a decoder, layer by layer.

One graph of the whole decoder takes minutes to compile, for its layers are unrolled in it. Layers of a kind share the
graph that is compiled for the first of them, so that Granite's take three, however many they are: a Mamba-2 layer, an
attention layer, and the first one, whose input wants no gradient.
"""

from typing import Any

import torch._inductor
from torch import nn

MODES = {
    "default": "default",
    "reduce-overhead": "reduce-overhead",
    # Autotuned without CUDA graphs: the second run of one overwrites the gradients that the first has left, and a step
    # accumulates them (pytorch/pytorch#169545).
    "max-autotune": "max-autotune-no-cudagraphs",
}
"""``--compile-mode`` as torch.compile takes it."""

OPTIONS = {"realize_reads_threshold": 32, "realize_opcount_threshold": 400, "realize_acc_reads_threshold": 32}
"""Of Inductor: what is made of many numbers, or by many operations, is made anew where it is used. Of the scan's decays
that are (time, chunk) for each head, those that are written and read again are a quarter of what a layer moves."""


def options_of(mode: str) -> dict[str, Any]:
    """What torch.compile is given for a layer, of a mode of ``MODES``."""
    return torch._inductor.list_mode_options(MODES[mode]) | OPTIONS


def decoder_layers(model: nn.Module) -> nn.ModuleList | None:
    """The decoder's layers; None where they cannot be told."""
    count = model.config.num_hidden_layers
    return next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)


def compile_decoder(model: nn.Module, mode: str) -> None:
    """Have a model's decoder compiled at its first call: each layer, or all of it where layers cannot be told apart.

    Args:
        model: whose layers it is done to.
        mode: one of ``MODES``.
    """
    for part in decoder_layers(model) or [model.base_model]:
        part.compile(options=options_of(mode))
