"""Training and scoring through Mamba-2 layers without the library's fused kernel.

With mamba-ssm installed, transformers' layer calls in training one fused function with
``self.out_proj.weight``, past whatever wraps ``out_proj``: a LoRA adapter there gets no gradient
and a 4-bit weight is read as if it were a matrix. So the forward pass without a cache is replaced
here, the one place where granite-scu reaches into a transformers model. It calls ``in_proj`` and
``out_proj`` as modules. Generation (with a cache) keeps the library's forward.
"""

import types

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from granite_scu.model.conv import causal_conv_silu
from granite_scu.model.norm import gated_norm, groups_of, is_gated_norm
from granite_scu.model.ssd import ssd_scan

_PARAMETERS = ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj")
_SIZES = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "conv_dim", "time_step_limit")


def is_mamba2(module: nn.Module) -> bool:
    """Whether a module is a Mamba-2 mixer of transformers' family (Granite hybrid, Bamba, Falcon-H1, Mamba-2)."""
    return all(hasattr(module, name) for name in ("in_proj", "conv1d", "A_log", "out_proj", "ssm_state_size"))


def install(model: nn.Module) -> int:
    """Replace the cache-free forward of every Mamba-2 layer in ``model``; returns how many.

    Raises:
        RuntimeError: a layer lacks a parameter or size that the forward needs (the library changed).
    """
    layers = [(name, module) for name, module in model.named_modules() if is_mamba2(module)]
    for name, layer in layers:
        missing = [field for field in _PARAMETERS + _SIZES if not hasattr(layer, field)]
        if missing:
            raise RuntimeError(
                f"{name} ({type(layer).__name__}) has no {', '.join(missing)}: "
                "this transformers version is not supported; see the range in pyproject.toml"
            )
        layer.norm.granite_scu_plain = is_gated_norm(layer.norm)
        layer.forward = types.MethodType(_forward(type(layer).forward), layer)
    return len(layers)


def _forward(library_forward):
    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        if cache_params is not None:
            return library_forward(
                self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
        return mix(self, hidden_states, attention_mask)

    return forward


def mix(layer: nn.Module, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """A Mamba-2 mixer over whole sequences.

    Args:
        layer: the mixer whose parameters are used.
        hidden: (batch, time, hidden) inputs.
        attention_mask: (batch, time), zero where padded; None when nothing before a token is padding.

    Returns:
        (batch, time, hidden) outputs in the dtype of ``hidden``.
    """
    batch, time, _ = hidden.shape
    groups_state = layer.n_groups * layer.ssm_state_size
    hidden = _zero_padding(hidden, attention_mask)
    gate, conv_in, dt = layer.in_proj(hidden).split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    conv_out = _zero_padding(causal_conv_silu(conv_in, weight, bias), attention_mask)
    x, b, c = conv_out.split([layer.intermediate_size, groups_state, groups_state], -1)
    dt = F.softplus(dt.float() + layer.dt_bias.float()).clamp(*layer.time_step_limit)
    y = ssd_scan(
        x.view(batch, time, layer.num_heads, layer.head_dim),
        dt,
        -layer.A_log.float().exp(),
        b.view(batch, time, layer.n_groups, -1),
        c.view(batch, time, layer.n_groups, -1),
        layer.D,
    )
    return layer.out_proj(_norm(layer.norm, y.flatten(2), gate, hidden.dtype))


def _norm(norm: nn.Module, y: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    if not norm.granite_scu_plain:
        return norm(y, gate).to(dtype)
    return gated_norm(y, gate, norm.weight, norm.variance_epsilon, groups_of(norm), dtype)


def _zero_padding(states: Tensor, attention_mask: Tensor | None) -> Tensor:
    return states if attention_mask is None else states * attention_mask[..., None].to(states.dtype)
