"""Which scan and convolution the Mamba-2 layers of a run get: compiled ones that prove right here, or else ours.

The candidates are the separate kernels of mamba-ssm and fla-core, never mamba-ssm's fused one, which takes
``out_proj.weight`` and so passes adapters by (see ``mamba``). That a package is installed says little: Triton's
kernels depend on its version and on the GPU, some give wrong gradients without a word. So before a run takes them,
they must reproduce ours, outputs and every gradient, in the run's precision and at the model's sizes.
"""

import functools
import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from granite_scu.config.errors import UserError
from granite_scu.model.description_length import exact_products
from granite_scu.model.mamba2.conv import runs_of
from granite_scu.model.mamba2.mamba import TORCH, Kernels, activated_conv

log = logging.getLogger(__name__)

INSTALL = "pip install 'granite-scu[kernels]'"

MAMBA_CHUNK = 256
"""Tokens per chunk of mamba-ssm's scan; its authors' own default."""

LENGTH = 2 * MAMBA_CHUNK + 5
"""Tokens of the check: odd, and in three chunks of the longest kind, so that states are carried twice."""

RATES = {"weak": (-2.0, -1.0), "strong": (0.5, 1.5)}
"""Decimal logarithms of the slowest and fastest decay of each check. Apart: an error in what has decayed is small."""

ROUNDINGS = 4
"""Errors of a right kernel are about half the spacing of the floating-point numbers, whichever the input (measured on
the CPU, our scan and one that rounds where fla-core's does, against fp32); eight times that is wrong."""

FP32_ERROR = 1e-4
"""Allowed in fp32, where the order of sums decides. Kernels that take products in TF32 err by more and do not pass,
even where ``--tf32`` lets PyTorch take them: their error could not be told from a fault."""


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


# What there is.


def mamba_ssm() -> Kernels:
    """mamba-ssm's Triton scan and, where it is installed, causal-conv1d's convolution. Raises what the import does."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    @torch.compiler.disable  # Triton's autotuning does not trace
    def scan(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, seq_idx: Tensor | None = None
    ) -> Tensor:
        numbers = _counted(seq_idx)
        y = mamba_chunk_scan_combined(x=x, dt=dt, A=a, B=b, C=c, chunk_size=MAMBA_CHUNK, D=d, seq_idx=numbers)
        return y.float()

    name = f"{_named('mamba-ssm')}'s Triton kernels"
    if version_of("causal-conv1d") is None:
        return Kernels(name, scan, activated_conv)
    from causal_conv1d import causal_conv1d_fn

    @torch.compiler.disable
    def convolve(inputs: Tensor, conv: nn.Conv1d, seq_idx: Tensor | None = None) -> Tensor:
        # Channels stay last in memory: the kernel reads both layouts, and a copy would cost what it saves.
        channels_first, weight = inputs.transpose(1, 2), conv.weight.squeeze(1)
        out = causal_conv1d_fn(
            x=channels_first, weight=weight, bias=conv.bias, seq_idx=_counted(seq_idx), activation="silu"
        )
        return out.transpose(1, 2)

    return Kernels(f"{name} and {_named('causal-conv1d')}", scan, convolve)


def _counted(seq_idx: Tensor | None) -> Tensor | None:
    """Numbers of documents as both packages want them: none comes back later, 32 bits."""
    return None if seq_idx is None else runs_of(seq_idx).int()


def fla_core() -> Kernels:
    """flash-linear-attention's Triton kernels: the scan is its gated linear attention. Raises what the import does."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.simple_gla import chunk_simple_gla

    @torch.compiler.disable
    def scan(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, seq_idx: Tensor | None = None
    ) -> Tensor:
        # Queries, keys and values must have equally many heads (fla-core 0.6.0), so groups are written out.
        share = x.shape[2] // b.shape[2]
        queries, keys = (t.unsqueeze(3).expand(-1, -1, -1, share, -1).flatten(2, 3) for t in (c, b))
        values = (x * dt.unsqueeze(-1)).to(x.dtype)
        inputs, bounds = {"q": queries, "k": keys, "v": values, "g": dt * a}, _bounds_of(seq_idx)
        if bounds is not None:
            inputs = {name: _in_one_row(t) for name, t in inputs.items()}
        y, _ = chunk_simple_gla(**inputs, scale=1.0, cu_seqlens=bounds)
        return y.view(x.shape).float() + x.float() * d.float().unsqueeze(-1)

    @torch.compiler.disable
    def convolve(inputs: Tensor, conv: nn.Conv1d, seq_idx: Tensor | None = None) -> Tensor:
        bounds = _bounds_of(seq_idx)
        x = inputs if bounds is None else _in_one_row(inputs)
        out, _ = causal_conv1d(x=x, weight=conv.weight.squeeze(1), bias=conv.bias, activation="silu", cu_seqlens=bounds)
        return out.view(inputs.shape)

    return Kernels(f"{_named('fla-core')}'s Triton kernels", scan, convolve)


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


CANDIDATES: dict[str, Callable[[], Kernels]] = {"mamba-ssm": mamba_ssm, "fla-core": fla_core}
"""Distributions that have kernels, in the order in which they are tried."""


def installed() -> dict[str, str]:
    """Versions of the candidates that are installed."""
    found = {name: version_of(name) for name in CANDIDATES}
    return {name: version for name, version in found.items() if version}


def version_of(distribution: str) -> str | None:
    """The version that is installed; None where none is."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _named(distribution: str) -> str:
    return f"{distribution} {version_of(distribution)}"


# What is taken.


def check(request: str, device_type: str) -> None:
    """Refuse ``--kernels cuda`` where there is nothing to try. Raises UserError."""
    if request != "cuda":
        return
    if device_type != "cuda":
        raise UserError("--kernels cuda: the run is on the CPU, where compiled kernels do not run; use --kernels auto")
    if not installed():
        raise UserError(f"--kernels cuda: neither {' nor '.join(CANDIDATES)} is installed; {INSTALL}")


@functools.cache  # a run loads its model more than once, and is warned once
def choose(request: str, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Kernels:
    """The first candidate that proves right on ``device``, or ours.

    Args:
        request: ``torch`` takes ours; ``auto`` the first compiled ones that prove right, else ours; ``cuda`` insists.
        device: where the layers will run.
        dtype: of their products.
        sizes: of the layers.

    Raises:
        UserError: ``cuda``, and no compiled kernels are there or right.
    """
    check(request, device.type)
    if request == "torch" or device.type != "cuda":
        return TORCH
    kernels, refused = first_right(device, dtype, sizes)
    if refused and kernels is TORCH and request == "cuda":
        raise UserError(f"--kernels cuda: {'; '.join(refused)}; use --kernels auto, or another version")
    if refused:
        log.warning("%s; the Mamba-2 layers run in %s", "; ".join(refused), kernels.name)
    return kernels


def first_right(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> tuple[Kernels, list[str]]:
    """The first installed candidate that proves right, or ours, and what was wrong with those before it.

    Arguments as of ``prove``.
    """
    refused = []
    for name in installed():
        try:
            kernels = CANDIDATES[name]()
            fault = prove(kernels, device, dtype, sizes)
        except Exception as error:  # whatever a compiler or a driver may raise: these kernels do not work here
            fault = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if fault is None:
            return kernels, refused
        refused.append(f"{_named(name)} failed its self-check ({fault})")
    return TORCH, refused


# Whether it is right.


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
    lengths = [1, 2, 60, MAMBA_CHUNK, 100]
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
