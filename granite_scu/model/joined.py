"""Weights with a factor of their adapters beside them, so that one product sums both.

Added by itself, an adapter's wide product reads and writes the sum once more. Beside the weight, a factor makes the
product's inner side longer by the rank. So the weights of compiled layers are laid out, and all factors copied before
each forward pass, in the weights' dtype: a few kernels for all layers. The outer sides stay as they are: a GPU cuts
them into tiles, and a rank more may take a whole row of these more.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from granite_scu.model.mamba2.tiling import kind_of

EVEN = 8
"""The rank is filled up to a multiple of it with zeros: a GPU's products want rows that begin at 16 bytes."""


def is_plain(base: nn.Module) -> bool:
    """Whether a layer is a frozen weight of full precision and nothing else."""
    return type(base) is nn.Linear and base.bias is None and not base.weight.requires_grad


def _with_one_adapter(model: nn.Module) -> Iterator[LoraLayer]:
    for module in model.modules():
        if isinstance(module, LoraLayer) and is_plain(module.base_layer) and len(module.lora_A) == 1:
            [dropout] = module.lora_dropout.values()
            if isinstance(dropout, nn.Identity):
                yield module


class Copies:
    """Copies of the factors A (rank, in) and B (out, rank) of updates s B A of frozen weights W (out, in).

    Of more outputs than inputs B stands left of the weight, else A below it. A layer has as ``joined`` this tensor and,
    apart, s A, s B and the other of A and B.
    """

    def __init__(self, model: nn.Module) -> None:
        self.factors: list[Tensor] = []
        self.scales: list[float] = []
        self.plain: list[Tensor] = []
        self.scaled: list[Tensor] = []
        for module in _with_one_adapter(model):
            self._join(module)

    def _join(self, module: LoraLayer) -> None:
        [name] = module.lora_A
        a, b = module.lora_A[name].weight, module.lora_B[name].weight
        weight, rank = module.base_layer.weight.detach(), _filled(a)
        (out, inner), is_wide = weight.shape, _is_wide(a, b)
        whole = weight.new_zeros(out, rank + inner) if is_wide else weight.new_zeros(out + rank, inner)
        module.base_layer.weight.data = (whole[:, rank:] if is_wide else whole[:out]).copy_(weight)
        scaled_a, scaled_b = weight.new_zeros(rank, inner), weight.new_zeros(out, rank)
        other = torch.zeros_like(scaled_a if is_wide else scaled_b)
        plain_a, plain_b = (other, whole[:, :rank]) if is_wide else (whole[out:], other)
        module.joined = whole, scaled_a, scaled_b, other
        for tensor in module.joined:  # as a parameter is: of one shape, and not copied for a CUDA graph
            torch._dynamo.mark_static(tensor)
            torch._dynamo.mark_static_address(tensor, guard=False)
        self.factors += [a, b]
        self.scales += [module.scaling[name]] * 2
        self.plain += [plain_a[: len(a)], plain_b[:, : len(a)]]
        self.scaled += [scaled_a[: len(a)], scaled_b[:, : len(a)]]

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Copy the factors as they are now."""
        pairs = list(zip(self.plain, self.factors, strict=True))
        if pairs:
            pairs += zip(self.scaled, torch._foreach_mul(self.factors, self.scales), strict=True)
        for alike in (True, False):  # one kernel takes many that lie in memory alike, and one of the others
            if chosen := [(to, t) for to, t in pairs if (to.stride() == t.stride()) == alike]:
                torch._foreach_copy_(*map(list, zip(*chosen, strict=True)))


def join(model: nn.Module) -> None:
    """Put a factor of each adapter that is alone on a plain layer beside the layer's weight.

    Args:
        model: on its device; its weights become views of longer ones, and its forward pass copies the factors first.
    """
    model.register_forward_pre_hook(Copies(model).refresh)


def _filled(a: Tensor) -> int:
    return -(-len(a) // EVEN) * EVEN


def _is_wide(a: Tensor, b: Tensor) -> bool:
    return b.shape[0] > a.shape[1]


class Product(torch.autograd.Function):
    """inputs W^T + s inputs A^T B^T, of inputs (tokens, in) and what is ``joined``; A and B give their gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, a: Tensor, b: Tensor, *joined: Tensor) -> Tensor:
        whole, scaled_a, scaled_b, other = joined
        ctx.rank, ctx.is_wide, ctx.dtypes = len(a), _is_wide(a, b), (a.dtype, b.dtype)
        narrow = inputs @ scaled_a.mT
        if ctx.is_wide:
            both = torch.cat([narrow, inputs], 1)
            ctx.save_for_backward(whole, scaled_b, other, both)  # both being one tensor, they are written there at once
            return both @ whole.mT
        ctx.save_for_backward(whole, scaled_b, other, inputs, narrow)
        return torch.addmm(inputs @ whole[: len(b)].mT, narrow, other.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        whole, scaled_b, other, inputs, *narrow = ctx.saved_tensors
        d_narrow, filled = d_outputs @ scaled_b, scaled_b.shape[1]
        if ctx.is_wide:
            narrow, inputs = [inputs[:, :filled]], inputs[:, filled:]
            d_inputs = torch.addmm(d_outputs @ whole[:, filled:], d_narrow, other)
        else:
            d_inputs = torch.cat([d_outputs, d_narrow], 1) @ whole
        d_a, d_b = map(product, (d_narrow.mT, d_outputs.mT), (inputs, *narrow), ctx.dtypes)
        return d_inputs, d_a[: ctx.rank], d_b[:, : ctx.rank], None, None, None, None


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix product in a dtype, which a GPU sums and writes in it."""
    if left.dtype != dtype and kind_of(left.device) == "cuda":
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
