"""LoRA on the experts of a mixture: matrices in stacks, of which a token meets a few.

    y = W_e x + B_e (s A_e) x        for each token x that is sent to expert e

PEFT puts the factors of a whole stack into two matrices (``target_parameters``). Its own forward pass makes W_e + Delta
W_e of every expert, keeps that for the backward pass, and takes the gradient of all of it there: of Granite-4.0-H-Tiny
12 GB in bf16, and as many operations as training the experts themselves. So the forward pass is replaced here. Where
no adapter is switched on, it is transformers' own.
"""

import types
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from granite_scu.config.errors import UserError

PARAMETERS = ("gate_up_proj", "down_proj")
"""The stacks of a layer's experts, (experts, out, in) each."""

ALIGNED = 8
"""Numbers that a row of a grouped product is a multiple of: 16 bytes of 16-bit numbers, which the kernels want."""


COUNTED = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configurations call the number of a layer's experts."""


def number(config: PretrainedConfig) -> int:
    """Experts of a layer; 0 in a model without."""
    return next((found for name in COUNTED if (found := getattr(config, name, None))), 0)


def stacks(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every stack of experts' matrices that an adapter can sit on, (experts, out, in), by its full name.

    They are those of modules that transformers has given its common interface to experts: gated, without biases, and
    (out, in) each.
    """
    return {
        f"{name}.{parameter}": getattr(module, parameter)
        for name, module in model.named_modules()
        if _is_known(module)
        for parameter in PARAMETERS
    }


def require(model: nn.Module) -> dict[str, nn.Parameter]:
    """``stacks``, of which there must be one.

    Raises:
        UserError: the model has no experts, or not of a form that is known.
    """
    if found := stacks(model):
        return found
    kind = getattr(model.config, "model_type", "a")
    has = "has experts of a form that is not known here" if number(model.config) else "has no experts"
    raise UserError(f"--lora-experts: this {kind} model {has}; leave --lora-experts out")


def _is_known(module: nn.Module) -> bool:
    shaped = all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in PARAMETERS)
    form = [getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed")]
    return shaped and form == [True, False, False]


def wrappers(model: nn.Module) -> Iterator[tuple[str, ParamWrapper]]:
    """What PEFT wraps around the experts of a layer, one for each stack, by the name it has in the model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, ParamWrapper))


def name_of(path: str, wrapper: ParamWrapper) -> str:
    """The full name of the stack that a wrapper adapts. Wrappers of one module lie in one another as ``base_layer``.

    Args:
        path: of the wrapper in the model.
        wrapper: the wrapper.
    """
    parts = [part for part in path.split(".") if part != "base_layer"]
    return ".".join([*parts, wrapper.parameter_name])


def install(model: nn.Module) -> None:
    """Replace the forward pass of every module whose stacks are adapted; any number of adapters, one at a time."""
    inner = {id(module.base_layer) for _, module in wrappers(model)}
    for _, module in list(wrappers(model)):
        if id(module) not in inner:
            module.forward = types.MethodType(_forward, module)


def _forward(self: ParamWrapper, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' outputs for each token, weighted and summed, (tokens, hidden).

    Args:
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k) the experts that a token is sent to.
        top_k_weights: (tokens, k) what their outputs count.
    """
    experts, adapted = self.get_base_layer(), _nested(self)
    active = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
    if not active:
        return experts(hidden_states, top_k_index, top_k_weights)
    (adapter,) = active
    count, k = experts.num_experts, top_k_index.shape[-1]
    order, ends = _grouped(top_k_index.flatten(), count)
    inputs = hidden_states[order // k]

    def product(x: Tensor, name: str) -> Tensor:
        stack = getattr(experts, name)
        whole = _product(x, stack, ends)
        return whole if name not in adapted else whole + _low_rank(x, adapted[name], adapter, stack.dtype, ends)

    outputs = product(experts._apply_gate(product(inputs, "gate_up_proj")), "down_proj")
    outputs = outputs * top_k_weights.flatten()[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return outputs[place].unflatten(0, (-1, k)).sum(1).to(hidden_states.dtype)


def _nested(wrapper: ParamWrapper) -> dict[str, ParamWrapper]:
    """A wrapper and those inside of it, by the stack that each adapts."""
    found, module = {}, wrapper
    while isinstance(module, ParamWrapper):
        found[module.parameter_name] = module
        module = module.base_layer
    return found


def _grouped(expert: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order that puts the tokens of an expert beside one another, and where each expert's end, (experts,)."""
    by_number, order = torch.sort(expert)
    # Nothing here is waited for; a count by bincount would be.
    numbers = torch.arange(count, device=expert.device, dtype=by_number.dtype)
    return order, torch.searchsorted(by_number, numbers, right=True).int()


def _low_rank(x: Tensor, wrapper: ParamWrapper, adapter: str, dtype: torch.dtype, ends: Tensor) -> Tensor:
    a = (wrapper.lora_A[adapter].weight * wrapper.scaling[adapter]).unflatten(0, (wrapper.num_experts, -1))
    a = F.pad(a, (0, 0, 0, -a.shape[1] % ALIGNED)).to(dtype)
    b = aligned_b(wrapper.lora_B[adapter].weight, wrapper.num_experts, a.shape[1], dtype)
    return _product(_product(x, a, ends), b, ends)


# An operation of its own: within a compiled layer Inductor would leave the result as it lies in PEFT's matrix, which
# the grouped product refuses.
@torch.library.custom_op("granite_scu::aligned_b", mutates_args=())
def aligned_b(b: Tensor, experts: int, width: int, dtype: torch.dtype) -> Tensor:
    """B of each expert, (experts, out, width), from (out, rank experts); zeros fill the rank up to ``width``."""
    found = b.new_zeros(experts, len(b), width, dtype=dtype)
    found[..., : b.shape[1] // experts] = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    return found


@aligned_b.register_fake
def _(b: Tensor, experts: int, width: int, dtype: torch.dtype) -> Tensor:
    return b.new_empty(experts, len(b), width, dtype=dtype)


def _remember_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    b, experts, *_ = inputs
    ctx.rank, ctx.dtype = b.shape[1] // experts, b.dtype


def _backward_of_aligned_b(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradient[..., : ctx.rank].permute(1, 2, 0).flatten(1).to(ctx.dtype), None, None, None


aligned_b.register_autograd(_backward_of_aligned_b, setup_context=_remember_shape)


def _product(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """x Wᵀ of each token with its expert's matrix. (tokens, in) and (experts, out, in); (tokens, out)."""
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(x, stack, ends)
