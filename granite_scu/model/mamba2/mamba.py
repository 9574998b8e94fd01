"""Mamba-2 layers without the library's fused kernel.

With mamba-ssm installed, transformers' layer calls in training one fused function with
``self.out_proj.weight``, past whatever wraps ``out_proj``: a LoRA adapter there gets no gradient
and a 4-bit weight is read as if it were a matrix. So the forward pass is replaced here, the one
place where granite-scu reaches into a transformers model. It calls ``in_proj`` and ``out_proj`` as
modules, and between them whatever scan and convolution it was given (see ``kernels``).

Generation fills and reads transformers' cache. The library's forward is kept where it takes mamba-ssm's kernels,
wants gradients, or gets several tokens behind others; else it would be the reference scan, many times as slow.
"""

import importlib.metadata
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache

from granite_scu.config.errors import UserError
from granite_scu.model.mamba2.conv import causal_conv_silu
from granite_scu.model.mamba2.norm import gated_norm, groups_of, is_gated_norm
from granite_scu.model.mamba2.ssd import scan_next, ssd_scan, ssd_scan_with_state

TESTED = "5.23.0"
"""The version of transformers in constraints.txt."""

HYBRID = "granitemoehybrid"
"""transformers' type of Granite 4.0 H, of which each layer that is not attention is known to be a Mamba-2 mixer."""

_PARAMETERS = ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj")
_SIZES = (
    "num_heads",
    "head_dim",
    "n_groups",
    "ssm_state_size",
    "intermediate_size",
    "conv_dim",
    "time_step_limit",
    "activation",
)
_ARGUMENTS = ("hidden_states", "cache_params", "attention_mask")


@dataclass(frozen=True)
class Kernels:
    """What computes a layer between its projections.

    Attributes:
        name: what the log calls it.
        scan: as ``ssd_scan``: (x, dt, a, b, c, d, seq_idx=None) -> (batch, time, heads, head_dim), dt after softplus
            and clamping.
        conv: ((batch, time, channels), the layer's convolution, seq_idx=None) -> the same shape, causal and after SiLU.
        generates: whether the library's own forward takes them where there is a cache.
    """

    name: str
    scan: Callable[..., Tensor]
    conv: Callable[..., Tensor]
    generates: bool = False


def activated_conv(inputs: Tensor, conv: nn.Conv1d, seq_idx: Tensor | None = None) -> Tensor:
    """The causal convolution and its SiLU. (batch, time, channels) in and out."""
    return causal_conv_silu(inputs, conv.weight.squeeze(1), conv.bias, seq_idx)


TORCH = Kernels("PyTorch", ssd_scan, activated_conv)
"""Ours: runs everywhere, and is what compiled kernels are checked against."""


def is_mamba2(module: nn.Module) -> bool:
    """Whether a module is a Mamba-2 mixer as Granite hybrid, Bamba and Mamba-2 have it.

    Falcon-H1's, which scales what it projects, is another, and so is Mamba-1's, which has no ``dt_bias``; they keep the
    library's forward.
    """
    parts = ("in_proj", "conv1d", "dt_bias", "A_log", "out_proj", "ssm_state_size")
    return all(hasattr(module, name) for name in parts) and not hasattr(module, "mup_vector")


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The Mamba-2 mixers of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if is_mamba2(module)}


def install(model: nn.Module, kernels: Kernels = TORCH, is_gated: Callable[[nn.Module], bool] = is_gated_norm) -> int:
    """Replace the forward of every Mamba-2 layer in ``model``; returns how many.

    Args:
        model: whose layers it is done to.
        kernels: what they take.
        is_gated: whether a layer's norm is ``gated_norm``; to be given where the weights have no values to try it on.

    Raises:
        UserError: as ``check``.
    """
    check(model)
    layers = layers_of(model)
    for layer in layers.values():
        layer.norm.granite_scu_plain = is_gated(layer.norm)
        layer.forward = types.MethodType(_forward(type(layer).forward, kernels), layer)
        layer.kernels = kernels
    return len(layers)


def check(model: nn.Module) -> None:
    """Refuse a model whose Mamba-2 layers are not as ``mix`` knows them, because the library changed.

    Raises:
        UserError: a layer lacks what the forward needs, or its own takes other arguments.
    """
    layers = layers_of(model)
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) == HYBRID:  # the library's own forward would run in layers passed over
        kinds = [kind for kind in config.layer_types if kind not in ("full_attention", "attention")]
        if len(kinds) != len(layers):
            named = " and ".join(sorted(set(kinds)))
            raise _unsupported(f"{len(layers)} of {len(kinds)} {named} layers are the Mamba-2 that granite-scu knows")
    for name, layer in layers.items():
        taken = inspect.signature(type(layer).forward).parameters
        missing = [field for field in _PARAMETERS + _SIZES if not hasattr(layer, field)]
        missing += [f"argument {argument}" for argument in _ARGUMENTS if argument not in taken]
        if missing:
            raise _unsupported(f"{name} ({type(layer).__name__}) has no {', '.join(missing)}")
        if layer.activation not in ("silu", "swish"):
            raise UserError(
                f"--model: {name} has the activation {layer.activation} behind its convolution; only silu is known"
            )


def _unsupported(what: str) -> UserError:
    return UserError(
        f"transformers {importlib.metadata.version('transformers')}: {what}; this version is not supported, take the "
        f"one that is tested: pip install transformers=={TESTED}"
    )


def kernels_in_use(model: nn.Module) -> Kernels | None:
    """What ``install`` gave the layers of ``model``; None for a model without Mamba-2 layers."""
    return next((layer.kernels for layer in layers_of(model).values()), None)


def _forward(library_forward, kernels: Kernels):
    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        if cache_params is None:
            return mix(self, hidden_states, attention_mask, kernels, kwargs.get("seq_idx"))
        goes_on = cache_params.has_previous_state(self.layer_idx)
        if kernels.generates or torch.is_grad_enabled() or (goes_on and hidden_states.shape[1] > 1):
            return library_forward(
                self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
        if goes_on:
            return _mix_next(self, hidden_states, cache_params)
        return mix(self, hidden_states, attention_mask, kernels, cache=cache_params)

    return forward


def mix(
    layer: nn.Module,
    hidden: Tensor,
    attention_mask: Tensor | None = None,
    kernels: Kernels = TORCH,
    seq_idx: Tensor | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """A Mamba-2 mixer over whole sequences.

    Args:
        layer: the mixer whose parameters are used.
        hidden: (batch, time, hidden) inputs.
        attention_mask: (batch, time), zero where padded; None when nothing before a token is padding.
        kernels: the scan and the convolution.
        seq_idx: (batch, time) numbers of documents that do not see one another, as ``runs_of`` counts them.
        cache: gets the states behind the last token; the scan is ours then, and without gradients.

    Returns:
        (batch, time, hidden) outputs in the dtype of ``hidden``.
    """
    hidden = _zero_padding(hidden, attention_mask)
    gate, conv_in, dt = _projected(layer, hidden)
    conv_out = _zero_padding(kernels.conv(conv_in, layer.conv1d, seq_idx=seq_idx), attention_mask)
    inputs = _of_scan(layer, conv_out, dt)
    if cache is None:
        y = kernels.scan(*inputs, layer.D, seq_idx=seq_idx)
    else:
        y, state = ssd_scan_with_state(*inputs, layer.D)
        cache.update_recurrent_state(state, layer.layer_idx)
        missing = layer.conv1d.kernel_size[0] - hidden.shape[1]
        _update_window(layer, F.pad(conv_in, (0, 0, missing, 0)) if missing > 0 else conv_in, cache)
    return layer.out_proj(_norm(layer.norm, y.flatten(2), gate, hidden.dtype))


def _mix_next(layer: nn.Module, hidden: Tensor, cache: Cache) -> Tensor:
    """As ``mix``, of one further token (batch, 1, hidden) behind those whose states the cache has."""
    gate, conv_in, dt = _projected(layer, hidden)
    window, conv = _update_window(layer, conv_in, cache), layer.conv1d
    summed = (window.float() * conv.weight.squeeze(1)).sum(-1)
    conv_out = F.silu(summed if conv.bias is None else summed + conv.bias).to(conv_in.dtype)
    x, dt, a, b, c = _of_scan(layer, conv_out, dt.squeeze(1))
    y = scan_next(_state_in(cache, layer.layer_idx), x, dt, a, b, c, layer.D)
    return layer.out_proj(_norm(layer.norm, y.flatten(1)[:, None], gate, hidden.dtype))


def _projected(layer: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    """The gate, what the convolution gets, and the step sizes before softplus."""
    return layer.in_proj(hidden).split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)


def _of_scan(layer: nn.Module, conv_out: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, dt, a, b and c as ``ssd_scan`` takes them."""
    groups_state = layer.n_groups * layer.ssm_state_size
    x, b, c = conv_out.split([layer.intermediate_size, groups_state, groups_state], -1)
    dt = F.softplus(dt.float() + layer.dt_bias.float()).clamp(*layer.time_step_limit)
    b, c = (t.unflatten(-1, (layer.n_groups, -1)) for t in (b, c))
    return x.unflatten(-1, (layer.num_heads, -1)), dt, -layer.A_log.float().exp(), b, c


def _update_window(layer: nn.Module, conv_in: Tensor, cache: Cache) -> Tensor:
    """The last inputs of the convolution, (batch, channels, width), which the cache has from now on."""
    width = layer.conv1d.kernel_size[0]
    inputs = conv_in[:, -width:].transpose(1, 2)
    return cache.update_conv_state(inputs, layer.layer_idx, conv_kernel_size=width)[..., -width:]


def _state_in(cache: Cache, layer_idx: int) -> Tensor:
    """The state of a layer's scan, (batch, heads, head_dim, state), which is written to."""
    states = cache.layers[layer_idx].recurrent_states
    return states if isinstance(states, Tensor) else states[0]  # older versions of transformers have one


def _norm(norm: nn.Module, y: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    if not norm.granite_scu_plain:
        return norm(y, gate).to(dtype)
    return gated_norm(y, gate, norm.weight, norm.variance_epsilon, groups_of(norm), dtype)


def _zero_padding(states: Tensor, attention_mask: Tensor | None) -> Tensor:
    return states if attention_mask is None else states * attention_mask[..., None].to(states.dtype)
