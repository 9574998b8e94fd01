"""The Triton kernels of mamba-ssm and fla-core, and the CUDA ones of causal-conv1d, as a layer wants them.

mamba-ssm and causal-conv1d are packages, or come built from the Hugging Face hub by way of the package ``kernels``.

Each is an operator of ``torch.library``, with a backward pass and with fakes that tell shapes alone. Dynamo does not
enter an operator, and needs not: a layer is compiled around it in one graph, also where its activations are
recomputed. ``torch.compiler.disable`` would break the graph, and inside of a checkpointed layer leave all of it
uncompiled. The operators keep their inputs for the backward pass, and their output where that is wanted again.

Never taken is mamba-ssm's fused function, which takes ``out_proj.weight`` and so passes adapters by (see ``mamba``).
The weights of the convolution are frozen: it has a gradient of its inputs alone.
"""

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from granite_scu.model.mamba2.mamba import Kernels, activated_conv

CHUNK = 256
"""Tokens per chunk of mamba-ssm's scan; its authors' own default."""


def version_of(distribution: str) -> str | None:
    """The version that is installed; None where it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def named(distribution: str) -> str:
    """A distribution and its version, such as ``fla-core 0.6.0``."""
    return f"{distribution} {version_of(distribution)}"


class _Kept:
    """In the place of autograd's context, where a library's Function is called below autograd."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


# mamba-ssm and causal-conv1d.

HUB = "kernels"
"""The distribution that fetches kernels from the hub, and as a source of kernels the hub itself."""
PACKAGES = "packages"
"""The other source: mamba-ssm and causal-conv1d as they are installed."""
HUB_VERSION = 1
"""Of the kernels on the hub, within which their functions stay what they are."""


def mamba_ssm() -> Kernels:
    """mamba-ssm's Triton scan and, where it is installed, causal-conv1d's convolution. Raises what the import does."""
    _scans(PACKAGES)
    name = f"{named('mamba-ssm')}'s Triton kernels"
    if version_of("causal-conv1d") is None:
        return Kernels(name, partial(_mamba_scan, PACKAGES), activated_conv, generates=True)
    _convolutions(PACKAGES)
    return replace(kernels_of(PACKAGES, f"{name} and {named('causal-conv1d')}"), generates=True)


def from_hub() -> Kernels:
    """mamba-ssm's scan and causal-conv1d's convolution from the hub; kept in its cache.

    ``kernels`` takes them from organisations alone that Hugging Face trusts. Raises what it does.
    """
    _scans(HUB)
    _convolutions(HUB)
    return kernels_of(HUB, "the hub's mamba-ssm and causal-conv1d")


def kernels_of(source: str, name: str) -> Kernels:
    """mamba-ssm's scan and causal-conv1d's convolution from a source, by operators that import them when they run."""
    return Kernels(name, partial(_mamba_scan, source), partial(_dao_convolve, source))


@functools.cache
def _scans(source: str) -> ModuleType:
    """The module of mamba-ssm that has the scan."""
    if source == HUB:
        return _fetched("mamba-ssm").ops.triton.ssd_combined
    import mamba_ssm.ops.triton.ssd_combined as installed

    return installed


@functools.cache
def _convolutions(source: str) -> ModuleType:
    """The module of causal-conv1d that has the convolution."""
    if source == HUB:
        return _fetched("causal-conv1d").causal_conv1d_interface
    import causal_conv1d.causal_conv1d_interface as installed

    return installed


def _fetched(name: str) -> Any:
    """The package that the hub's kernels of a name are; its submodules are attributes once it is imported."""
    import kernels

    return kernels.get_kernel(f"kernels-community/{name}", version=HUB_VERSION)


def _mamba_scan(
    source: str, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, seq_idx: Tensor | None = None
) -> Tensor:
    return mamba2_scan(x, dt, a, b, c, d, _counted(seq_idx), source).float()


def _dao_convolve(source: str, inputs: Tensor, conv: nn.Conv1d, seq_idx: Tensor | None = None) -> Tensor:
    return causal_conv1d_silu(inputs, conv.weight.squeeze(1), conv.bias, _counted(seq_idx), source)


def _counted(seq_idx: Tensor | None) -> Tensor | None:
    """Numbers of documents as both packages want them, of 32 bits."""
    return None if seq_idx is None else seq_idx.int()


@torch.library.custom_op("granite_scu::mamba2_scan", mutates_args=())
def mamba2_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, documents: Tensor | None, source: str
) -> Tensor:
    """mamba-ssm's scan, arguments as of ``ssd_scan``; the result in the dtype of ``x``."""
    return _scans(source)._mamba_chunk_scan_combined_fwd(x, dt, a, b, c, CHUNK, D=d, seq_idx=documents)[0]


@torch.library.custom_op("granite_scu::mamba2_scan_backward", mutates_args=())
def mamba2_scan_backward(
    d_out: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, out: Tensor,
    documents: Tensor | None, source: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of (x, b, c) as one tensor, which a layer's convolution made of one, and those of (dt, a, d)."""
    d_xbc = _beside_one_another(x, b, c)
    dx, db, dc = _taken_apart(d_xbc, x, b, c)
    backward = _scans(source)._mamba_chunk_scan_combined_bwd
    _, d_dt, da, _, _, dd, *_ = backward(d_out, x, dt, a, b, c, out, CHUNK, D=d, seq_idx=documents, dx=dx, dB=db, dC=dc)
    return d_xbc, *(t.to(like.dtype).contiguous() for t, like in zip((d_dt, da, dd), (dt, a, d), strict=True))


def _beside_one_another(x: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Room for tensors (batch, time, heads or groups, size) of one dtype, (batch, time, all)."""
    return x.new_empty(*x.shape[:2], sum(t.shape[2] * t.shape[3] for t in (x, b, c)))


def _taken_apart(together: Tensor, x: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    """The parts of what lies beside one another, shaped as x, b and c."""
    parts = together.split([t.shape[2] * t.shape[3] for t in (x, b, c)], 2)
    return [part.view(like.shape) for part, like in zip(parts, (x, b, c), strict=True)]


def _backward_of_mamba2_scan(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, documents = ctx.saved_tensors
    x, _, _, b, c, _ = inputs
    d_xbc, d_dt, da, dd = mamba2_scan_backward(d_out.contiguous(), *inputs, out, documents, ctx.source)
    dx, db, dc = _taken_apart(d_xbc, x, b, c)
    return dx, d_dt, da, db, dc, dd, None, None


@torch.library.custom_op("granite_scu::causal_conv1d_silu", mutates_args=())
def causal_conv1d_silu(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, source: str) -> Tensor:
    """causal-conv1d's convolution and SiLU. (batch, time, channels) in and out, ``weight`` (channels, width)."""
    return _dao_conv(_Kept(), x, weight, bias, documents, source).transpose(1, 2).contiguous()


@torch.library.custom_op("granite_scu::causal_conv1d_silu_backward", mutates_args=())
def causal_conv1d_silu_backward(
    d_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, source: str
) -> Tensor:
    """The gradient of ``x``."""
    _dao_conv(kept := _Kept(), x, weight, bias, documents, source)
    found = _convolutions(source).CausalConv1dFn.backward(kept, d_out.transpose(1, 2))
    return found[0].transpose(1, 2).contiguous()


def _dao_conv(
    kept: _Kept, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, source: str
) -> Tensor:
    # Channels stay last in memory: the kernel reads both layouts, and a copy would cost what it saves.
    forward = _convolutions(source).CausalConv1dFn.forward
    return forward(kept, x.transpose(1, 2), weight, bias, documents, None, False, None, "silu")


# fla-core.


def fla_core() -> Kernels:
    """flash-linear-attention's Triton kernels: the scan is its gated linear attention. Raises what the import does."""
    import fla.modules.causal_conv1d
    import fla.ops.simple_gla  # noqa: F401

    return Kernels(f"{named('fla-core')}'s Triton kernels", _fla_scan, _fla_convolve)


def _fla_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, seq_idx: Tensor | None = None
) -> Tensor:
    y = gated_linear_attention(c, b, (x * dt.unsqueeze(-1)).to(x.dtype), dt * a, seq_idx)
    return y.float() + x.float() * d.float().unsqueeze(-1)


def _fla_convolve(inputs: Tensor, conv: nn.Conv1d, seq_idx: Tensor | None = None) -> Tensor:
    return fla_conv_silu(inputs, conv.weight.squeeze(1), conv.bias, seq_idx)


@torch.library.custom_op("granite_scu::gated_linear_attention", mutates_args=())
def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, documents: Tensor | None) -> Tensor:
    """fla-core's simple_gla: y_t = H_t^T q_t with H_t = exp(g_t) H_{t-1} + k_t v_t^T for each head.

    Args:
        q: (batch, time, groups, state) queries; ``groups`` divides ``heads``.
        k: (batch, time, groups, state) keys.
        v: (batch, time, heads, head_dim) values.
        g: (batch, time, heads) logarithms of the decays, fp32.
        documents: (batch, time) numbers of documents; where the number changes, the state starts from zero.
    """
    return _gla(_Kept(), q, k, v, g, documents).view(v.shape)


@torch.library.custom_op("granite_scu::gated_linear_attention_backward", mutates_args=())
def gated_linear_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of (q, k, v, g)."""
    from fla.ops.simple_gla.chunk import ChunkSimpleGLAFunction

    y = _gla(kept := _Kept(), q, k, v, g, documents)
    dq, dk, dv, dg, *_ = ChunkSimpleGLAFunction.backward(kept, dy.view(y.shape), None)
    dq, dk = (d.view(*v.shape[:2], q.shape[2], -1, q.shape[3]).sum(3, dtype=torch.float32).to(q) for d in (dq, dk))
    return dq, dk, dv.view(v.shape), dg.view(g.shape)


def _gla(kept: _Kept, q: Tensor, k: Tensor, v: Tensor, g: Tensor, documents: Tensor | None) -> Tensor:
    from fla.ops.simple_gla.chunk import ChunkSimpleGLAFunction

    # Queries, keys and values must have equally many heads (fla-core 0.6.0), so groups are written out.
    share = v.shape[2] // q.shape[2]
    queries, keys = (t.unsqueeze(3).expand(-1, -1, -1, share, -1).flatten(2, 3) for t in (q, k))
    inputs, bounds = [queries, keys, v, g], _bounds_of(documents)
    if bounds is not None:
        inputs = [_in_one_row(t) for t in inputs]
    return ChunkSimpleGLAFunction.forward(kept, *inputs, None, 1.0, None, False, False, bounds, None)[0]


@torch.library.custom_op("granite_scu::fla_conv_silu", mutates_args=())
def fla_conv_silu(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    """fla-core's convolution and SiLU. (batch, time, channels) in and out, ``weight`` (channels, width)."""
    return _fla_conv(_Kept(), x, weight, bias, documents).view(x.shape)


@torch.library.custom_op("granite_scu::fla_conv_silu_backward", mutates_args=())
def fla_conv_silu_backward(
    d_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None
) -> Tensor:
    """The gradient of ``x``."""
    from fla.modules.causal_conv1d.ops import CausalConv1dFunction

    y = _fla_conv(kept := _Kept(), x, weight, bias, documents)
    return CausalConv1dFunction.backward(kept, d_out.view(y.shape), None)[0].reshape(x.shape).contiguous()


def _fla_conv(kept: _Kept, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    from fla.modules.causal_conv1d.ops import CausalConv1dFunction

    bounds = _bounds_of(documents)
    rows = x if bounds is None else _in_one_row(x)
    return CausalConv1dFunction.forward(kept, rows, weight, bias, None, None, False, "silu", bounds)[0]


@functools.lru_cache(maxsize=1)
def _bounds_of(seq_idx: Tensor | None) -> Tensor | None:
    """Where documents begin and the last one ends, counted through the rows of a batch: (documents + 1,), or None.

    Their number is not known before the device is asked. So the newest are kept, which all layers of a pass share.
    """
    if seq_idx is None:
        return None
    begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True).flatten()
    return F.pad(begins.nonzero().flatten(), (0, 1), value=begins.numel())


def _in_one_row(t: Tensor) -> Tensor:
    """(batch, time, ...) as (1, batch * time, ...)."""
    return t.flatten(0, 1).unsqueeze(0)


# What the compiler and autograd are told of the operators.


def _keep(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _keep_of_scan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, documents, ctx.source = inputs
    ctx.save_for_backward(*tensors, output, documents)


def _keep_of_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.source = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_conv(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return causal_conv1d_silu_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.source), None, None, None, None


def _like(*places: int) -> Callable[..., Any]:
    """A fake whose results are shaped as the arguments in these places, one or several, and lie in order."""

    def fake(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = tuple(torch.empty_like(inputs[place], memory_format=torch.contiguous_format) for place in places)
        return found if len(found) > 1 else found[0]

    return fake


mamba2_scan.register_fake(_like(0))
mamba2_scan_backward.register_fake(
    lambda d_out, x, dt, a, b, c, d, *rest: (_beside_one_another(x, b, c), *_like(0, 1, 2)(dt, a, d))
)
mamba2_scan.register_autograd(_backward_of_mamba2_scan, setup_context=_keep_of_scan)

gated_linear_attention.register_fake(_like(2))
gated_linear_attention_backward.register_fake(_like(1, 2, 3, 4))
gated_linear_attention.register_autograd(
    lambda ctx, dy: (*gated_linear_attention_backward(dy.contiguous(), *ctx.saved_tensors), None), setup_context=_keep
)

causal_conv1d_silu.register_fake(_like(0))
causal_conv1d_silu_backward.register_fake(_like(1))
causal_conv1d_silu.register_autograd(_backward_of_conv, setup_context=_keep_of_conv)

fla_conv_silu.register_fake(_like(0))
fla_conv_silu_backward.register_fake(_like(1))
fla_conv_silu.register_autograd(
    lambda ctx, d_out: (fla_conv_silu_backward(d_out.contiguous(), *ctx.saved_tensors), None, None, None),
    setup_context=_keep,
)
