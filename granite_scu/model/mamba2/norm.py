"""RMS norms, gated behind the scan and plain, and gates of MLPs, with a backward pass that keeps their inputs only."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from granite_scu.model.mamba2.conv import blocks
from granite_scu.model.mamba2.tiling import kind_of, pieces, put


def gated_norm(hidden: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, dtype: torch.dtype) -> Tensor:
    """weight * h / sqrt(mean(h^2) + eps) with h = hidden * SiLU(gate), computed in the dtype of ``hidden``.

    Args:
        hidden: (batch, time, channels), fp32 or wider.
        gate: (batch, time, channels).
        weight: (channels,).
        eps: keeps the root from zero.
        groups: equal parts of the channels, each with a mean of its own.
        dtype: of the result.
    """
    return _GatedNorm.apply(hidden, gate, weight, eps, groups, dtype)


def is_gated_norm(norm: nn.Module) -> bool:
    """Whether a module computes ``gated_norm``; others of the family gate after the norm, or not at all."""
    if not (hasattr(norm, "weight") and hasattr(norm, "variance_epsilon")):
        return False
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, norm.weight.numel())
    hidden, gate = (torch.randn(shape, generator=generator).to(norm.weight.device) for _ in range(2))
    with torch.no_grad():
        theirs = norm(hidden, gate)
        ours = gated_norm(hidden, gate, norm.weight, norm.variance_epsilon, groups_of(norm), torch.float32)
    return torch.allclose(ours, theirs.float(), rtol=1e-3, atol=1e-3)


def groups_of(norm: nn.Module) -> int:
    """The groups of a gated norm; one in versions of transformers that know none."""
    return norm.weight.numel() // getattr(norm, "group_size", norm.weight.numel())


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.eps, ctx.groups = eps, groups
        out = torch.empty_like(hidden, dtype=dtype)
        for block in blocks(hidden):
            scaled, _ = _normed(hidden[:, block] * F.silu(gate[:, block].to(hidden.dtype)), eps, groups)
            out = put(out, block, scaled * weight)
        ctx.save_for_backward(hidden, gate, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, weight = ctx.saved_tensors
        d_hidden, d_gate = torch.empty_like(hidden), torch.empty_like(gate, memory_format=torch.contiguous_format)
        d_weight = torch.zeros_like(weight, dtype=hidden.dtype)
        for block in blocks(hidden):
            h, z, d = hidden[:, block], gate[:, block].to(hidden.dtype), d_out[:, block].to(hidden.dtype)
            activation = F.silu(z)
            normed, inverse = _normed(h * activation, ctx.eps, ctx.groups)
            if ctx.needs_input_grad[2]:
                d_weight += (d * normed).sum((0, 1))
            d_normed = d * weight
            shared = (d_normed * normed).unflatten(-1, (ctx.groups, -1)).mean(-1, keepdim=True)
            d_product = torch.addcmul(d_normed.unflatten(-1, (ctx.groups, -1)), _grouped(normed, ctx), shared, value=-1)
            d_product = d_product.mul_(inverse).flatten(-2)
            d_hidden = put(d_hidden, block, d_product * activation)
            d_gate = put(d_gate, block, torch.ops.aten.silu_backward(d_product.mul_(h), z))
        return d_hidden, d_gate, d_weight.to(weight.dtype), None, None, None


DENSE = ("Granite", "Llama", "Mistral", "Olmo2", "Qwen2", "Qwen3")
PLAIN = tuple(f"{family}RMSNorm" for family in (*DENSE, "GraniteMoe", "GraniteMoeHybrid"))
"""Classes of transformers that compute ``_Norm``, by name."""

GATED = tuple(f"{family}MLP" for family in DENSE)
"""Those that compute down(act(gate(x)) * up(x))."""

ROWS = 64
"""Tokens whose gates are worked on at once on a CPU: they stay in its cache."""


def install(model: nn.Module) -> None:
    """Have plain norms and gates computed by ``_Norm`` and ``_Gate`` on a CPU: by their own operators they keep more.

    Args:
        model: from transformers; adapters may be on it.
    """
    for module in model.modules():
        if (name := type(module).__name__) in PLAIN:
            module.forward = MethodType(_norm, module)
        elif name in GATED and module.config.hidden_act in ("silu", "swish"):
            module.forward = MethodType(_mlp, module)


def _elsewhere(hidden: Tensor) -> bool:
    return kind_of(hidden.device) != "cpu" or torch.compiler.is_compiling()


def _norm(module: nn.Module, hidden: Tensor) -> Tensor:
    if _elsewhere(hidden):
        return type(module).forward(module, hidden)
    return _Norm.apply(hidden, module.weight, module.variance_epsilon)


def _mlp(module: nn.Module, hidden: Tensor) -> Tensor:
    if _elsewhere(hidden):
        return type(module).forward(module, hidden)
    return module.down_proj(_Gate.apply(module.gate_proj(hidden), module.up_proj(hidden)))


class _Gate(torch.autograd.Function):
    """SiLU(gate) * up, (..., channels)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(up, memory_format=torch.contiguous_format)
        g, u, o = (t.flatten(0, -2) for t in (gate, up, out))
        for part in pieces(len(o), ROWS, o.device):
            torch.mul(F.silu(g[part]), u[part], out=o[part])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (gate, up))
        g, u, d, dg, du = (t.flatten(0, -2) for t in (gate, up, d_out, d_gate, d_up))
        for part in pieces(len(d), ROWS, d.device):
            torch.mul(F.silu(g[part]), d[part], out=du[part])
            dg[part] = torch.ops.aten.silu_backward(d[part] * u[part], g[part])
        return d_gate, d_up


class _Norm(torch.autograd.Function):
    """weight * h / sqrt(mean(h^2) + eps), (..., channels), computed in fp32 or wider."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse = _normed(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), eps, 1)
        ctx.save_for_backward(hidden, weight, inverse)
        return normed.to(hidden.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, inverse = ctx.saved_tensors
        inverse = inverse.squeeze(-1)
        normed = hidden * inverse  # in fp32, as the second is
        d_weight = (d_out * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_normed = (d_out * weight).to(normed.dtype)
        shared = (d_normed * normed).mean(-1, keepdim=True)
        return d_normed.addcmul_(normed, shared, value=-1).mul_(inverse).to(hidden.dtype), d_weight, None


def _normed(h: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor]:
    """h over its root mean square, (batch, time, channels), and one over that root, (batch, time, groups, 1)."""
    parts = h.unflatten(-1, (groups, -1))
    inverse = parts.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return parts.mul(inverse).flatten(-2), inverse


def _grouped(t: Tensor, ctx: Any) -> Tensor:
    return t.unflatten(-1, (ctx.groups, -1))
