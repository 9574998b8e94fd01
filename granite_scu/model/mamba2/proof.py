"""Whether compiled kernels are right: outputs and every gradient must be those of ours, in the run's precision.

That a package is installed says little. Triton's kernels depend on its version and on the GPU, and some give wrong
gradients without a word.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from granite_scu.model.description_length import exact_products
from granite_scu.model.mamba2.mamba import TORCH, Kernels
from granite_scu.model.mamba2.packages import CHUNK

LENGTH = 2 * CHUNK + 5
"""Tokens of the check: odd, and in three chunks of the longest kind, so that states are carried twice."""

RATES = {"weak": (-2.0, -1.0), "strong": (0.5, 1.5)}
"""Decimal logarithms of the slowest and fastest decay of each check. Apart: an error in what has decayed is small."""

ROUNDINGS = 4
"""Errors of a right kernel are about half the spacing of the floating-point numbers, whichever the input (measured on
the CPU, our scan and one that rounds where fla-core's does, against fp32); eight times that is wrong."""

FP32_ERROR = 3e-4
"""Allowed in fp32, where the order of sums decides: mamba-ssm's gradient of dt is off by 1.0e-4 under strong decay, all
else by less (interpreted, on a CPU). Kernels that take products in TF32 err by 1.1e-3 and do not pass, even where
``--tf32`` lets PyTorch take them: their error could not be told from a fault."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer; Triton compiles for each, so what holds for one says little of another."""

    heads: int = 4
    head_dim: int = 16
    groups: int = 2
    state: int = 16
    conv_width: int = 4

    @classmethod
    def of(cls, layer: nn.Module) -> "Sizes":
        """Those of a Mamba-2 mixer."""
        width = layer.conv1d.kernel_size[0]
        return cls(layer.num_heads, layer.head_dim, layer.n_groups, layer.ssm_state_size, width)

    @classmethod
    def of_config(cls, config: Any) -> "Sizes | None":
        """Those of a transformers configuration; None where it has no Mamba-2 layers of Granite's kind."""
        names = ("n_heads", "d_head", "n_groups", "d_state", "d_conv")
        found = [getattr(config, f"mamba_{name}", None) for name in names]
        return cls(*found) if all(isinstance(value, int) for value in found) else None

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.state


def prove(kernels: Kernels, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> str | None:
    """What is wrong with ``kernels``; None when outputs and all gradients are those of ours in fp32.

    Args:
        kernels: what is to be checked.
        device: where.
        dtype: of the inputs; step sizes and decay rates are fp32, as in a layer.
        sizes: of the layer.
    """
    allowed = max(ROUNDINGS * torch.finfo(dtype).eps, FP32_ERROR)
    for what, run, inputs in _cases(device, dtype, sizes):
        with exact_products():
            expected = _results(run, TORCH, {name: tensor.float() for name, tensor in inputs.items()})
        for name, found in _results(run, kernels, inputs).items():
            right = expected[name]
            if found.shape != right.shape:
                return f"{what}: {name} has shape {tuple(found.shape)} instead of {tuple(right.shape)}"
            error = ((found.float() - right).norm() / right.norm()).item()
            if not error <= allowed:  # NaN is not
                return f"{what}: {name} is off by {error:.1e}, and {allowed:.1e} is allowed"
    return None


def _cases(
    device: torch.device, dtype: torch.dtype, sizes: Sizes
) -> Iterator[tuple[str, Callable[..., Tensor], dict[str, Tensor]]]:
    """What is tried: its name, how kernels are run on the inputs, and those. Inputs are strided as a layer's are."""
    draw = torch.Generator().manual_seed(0)  # its own: the run's numbers must not depend on what is installed

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    channels, grouped = sizes.conv_channels, (2, LENGTH, sizes.groups, sizes.state)
    documents = _documents().to(device)
    conv = nn.utils.skip_init(nn.Conv1d, channels, channels, sizes.conv_width, groups=channels).requires_grad_(False)
    conv.weight.copy_(normal(*conv.weight.shape))
    conv.bias.copy_(normal(channels))
    conv.to(device, dtype)
    projected = normal(2, LENGTH, sizes.inner + channels + sizes.heads).to(device, dtype)
    inputs = projected[..., sizes.inner : sizes.inner + channels]

    def convolve(kernels: Kernels, inputs: Tensor, **apart: Tensor) -> Tensor:
        return kernels.conv(inputs, conv, **apart)

    yield "the convolution", convolve, {"inputs": inputs}
    yield "the convolution of several documents", partial(convolve, seq_idx=documents), {"inputs": inputs}

    mixed = F.silu(normal(2, LENGTH, channels)).to(device, dtype)
    x, b, c = mixed.split([sizes.inner, *(2 * [sizes.groups * sizes.state])], -1)
    parts = {
        "x": x.view(2, LENGTH, sizes.heads, sizes.head_dim),
        "dt": F.softplus(2 * normal(2, LENGTH, sizes.heads) - 2).to(device),
        "b": b.view(grouped),
        "c": c.view(grouped),
        "d": normal(sizes.heads).to(device, dtype),
    }

    def scan(kernels: Kernels, **parts: Tensor) -> Tensor:
        return kernels.scan(**parts)

    rates = {strength: -torch.logspace(*ends, sizes.heads).to(device) for strength, ends in RATES.items()}
    for strength, a in rates.items():
        yield f"the scan under {strength} decay", scan, {**parts, "a": a}
    yield "the scan of several documents", partial(scan, seq_idx=documents), {**parts, "a": rates["weak"]}


def _documents() -> Tensor:
    """(2, LENGTH) numbers: a row of one document, and one of several, the first shorter than a convolution is wide."""
    lengths = [1, 2, 60, CHUNK, 100]
    several = torch.arange(len(lengths) + 1).repeat_interleave(torch.tensor([*lengths, LENGTH - sum(lengths)]))
    return torch.stack([torch.zeros_like(several), several])


def _results(run: Callable[..., Tensor], kernels: Kernels, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output, and the gradient of every input under the same random direction."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    device = next(iter(inputs.values())).device
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        output = run(kernels, **leaves)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(output, list(leaves.values()), direction.to(output))
    named = {f"the gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"the output": output.detach(), **named}
