"""The short causal convolution in front of the scan, and the SiLU behind it, with a backward pass of their own.

A depthwise convolution of width 4 does eight operations a number: what it costs is the passage through memory. So a
block of tokens is taken from inputs to outputs while it is in cache, and backward keeps the inputs only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from granite_scu.model.mamba2.tiling import pieces, put

BLOCK = 32
"""Tokens that are worked on together on a CPU."""


def causal_conv_silu(inputs: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None = None) -> Tensor:
    """SiLU of a depthwise causal convolution along time, computed in fp32 or wider.

    Args:
        inputs: (batch, time, channels).
        weight: (channels, width); its last column meets the token itself.
        bias: (channels,) or None.
        seq_idx: (batch, time) numbers of documents, none of which sees another; as ``runs_of`` counts them.

    Returns:
        (batch, time, channels) in the dtype of ``inputs``.
    """
    return _ConvSilu.apply(inputs, weight, bias, seq_idx)


def runs_of(seq_idx: Tensor) -> Tensor:
    """Documents counted from 0 in the order in which they come, (batch, time) of 32 bits: a number may come back."""
    return F.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1, dtype=torch.int32), (1, 0))


class _ConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, runs: Tensor | None) -> Tensor:
        outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        for block in blocks(inputs):
            window = _Window(inputs, runs, block, weight.shape[1])
            outputs = put(outputs, block, F.silu(_convolved(window, weight, bias)))
        ctx.save_for_backward(inputs, weight, bias, runs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, bias, runs = ctx.saved_tensors
        width, taps = weight.shape[1], _taps(weight, inputs)
        d_inputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        d_weight, d_bias = torch.zeros_like(taps), torch.zeros_like(taps[0])
        # The gradient at a token comes from the outputs at it and at the next width - 1, zero beyond the end.
        later = taps.new_zeros(inputs.shape[0], width - 1, inputs.shape[2])
        for block in reversed(blocks(inputs)):
            window = _Window(inputs, runs, block, width)
            before_silu = _convolved(window, weight, bias)
            d_sum = _written(torch.ops.aten.silu_backward(d_outputs[:, block].to(taps.dtype), before_silu), inputs)
            ahead, d_block = d_sum if _is_one() else torch.cat([d_sum, later], 1), torch.zeros_like(d_sum)
            for k, tap in enumerate(taps):
                lag = width - 1 - k
                d_block += _cut(_from(ahead, lag, d_sum.shape[1]) * tap, runs, block, lag)
                if ctx.needs_input_grad[1]:
                    d_weight[k] += (d_sum * window.tap(k)).sum((0, 1))
            if ctx.needs_input_grad[2]:
                d_bias += d_sum.sum((0, 1))
            d_inputs, later = put(d_inputs, block, d_block), ahead[:, : width - 1]
        return d_inputs, d_weight.mT.to(weight.dtype), None if bias is None else d_bias.to(bias.dtype), None


def blocks(inputs: Tensor) -> list[slice]:
    """Slices of the time of (batch, time, ...) that are worked on together: on a CPU, what fits its cache."""
    return pieces(inputs.shape[1], BLOCK, inputs.device)


class _Window:
    """The inputs of a block of tokens and of the ``width - 1`` before it, zero before the first."""

    def __init__(self, inputs: Tensor, runs: Tensor | None, block: slice, width: int) -> None:
        first = block.start - width + 1
        wide = torch.promote_types(inputs.dtype, torch.float32)
        inputs = inputs[:, max(first, 0) : block.stop].to(wide)
        self.inputs = inputs if _is_one() else F.pad(inputs, (0, 0, max(-first, 0), 0))
        self.runs, self.block, self.width = runs, block, width

    def tap(self, k: int) -> Tensor:
        """What column ``k`` of the weight meets at each token, (batch, block, channels)."""
        lag, count = self.width - 1 - k, self.block.stop - self.block.start
        return _cut(_from(self.inputs, -lag if _is_one() else k, count), self.runs, self.block, -lag)


def _is_one() -> bool:
    """Whether a block is all there is and lies in memory as it came: a compiler would keep what is padded in fp32."""
    return torch.compiler.is_compiling()


def _written(d_sum: Tensor, inputs: Tensor) -> Tensor:
    """What several tokens read; compiled it is written to memory, in the inputs' dtype.

    A compiler would compute it anew for each of them, and with it what the scan's gradients are made of: a kernel of
    740 instructions a number that runs out of registers. To give strides is what has Inductor write a tensor.
    """
    if not _is_one():
        return d_sum
    return d_sum.to(inputs.dtype).contiguous().as_strided(d_sum.shape, d_sum.stride()).to(d_sum.dtype)


def _from(values: Tensor, first: int, count: int) -> Tensor:
    """``count`` tokens of (batch, time, channels), which begin at ``first``; whatever where there are none."""
    if not _is_one():
        return values[:, first : first + count]
    return values[:, torch.arange(first, first + count, device=values.device).clamp(0, count - 1)]


def _convolved(window: _Window, weight: Tensor, bias: Tensor | None) -> Tensor:
    taps = _taps(weight, window.inputs)
    out = window.tap(0) * taps[0]
    for k in range(1, len(taps)):
        out.addcmul_(window.tap(k), taps[k])
    return out if bias is None else out.add_(bias)


def _taps(weight: Tensor, like: Tensor) -> Tensor:
    """(channels, width) as (width, channels) in the dtype that the sums are taken in."""
    return weight.mT.to(torch.promote_types(like.dtype, torch.float32)).contiguous()


def _cut(values: Tensor, runs: Tensor | None, block: slice, lag: int) -> Tensor:
    """``values`` of a block where the token ``lag`` later is there and of the same document, else 0."""
    if lag == 0 or (runs is None and not _is_one()):
        return values
    # By differences of 32 bits: what is less than a quarter of its inputs' size the compiler keeps, in another kernel.
    at = torch.arange(block.start, block.stop, dtype=torch.int32, device=values.device) + lag
    inside = at.clamp(0, (runs.shape[1] if runs is not None else len(at)) - 1)
    off = at - inside
    if runs is not None:
        off = off + (runs[:, inside] - runs[:, block])  # which has the sign of the first, as documents are counted
    return values * (off == 0).unsqueeze(-1)
