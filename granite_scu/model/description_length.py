r"""What the adapter costs and what the data costs, in bits per token.

For each adapted layer i with factors A_i (rank x in), B_i (out x rank) and scale s_i = alpha / rank (rank-stabilised:
alpha / sqrt(rank)), the update is Delta W_i = s_i B_i A_i, and under the prior N(0, sigma^2) on its entries, spread
over N tokens,

    ParamNPT = sum_i |Delta W_i|^2 / (2 sigma^2 N)           nats per token
    ParamBPT = ParamNPT / ln 2        DataBPT = cross-entropy / ln 2
    S        = ParamBPT / (DataBPT + ParamBPT)

Measured on Delta W and not on the factors: it is zero before training, and the same for every (A, B) that
gives the same model. Delta W is never formed: |B A|^2 = sum (A A^T o B^T B), two rank x rank products.

The measure "factors" takes |A_i|^2 + |B_i|^2 in place of |Delta W_i|^2, as the first Shannon Control Unit did. It
is kept for comparison: it is mostly A's random initialisation, so S is far from zero before training.

A run that starts from an adapter Delta W_0 = s B_0 A_0 is measured by what it adds. In factors of twice the rank

    Delta W - Delta W_0 = s B' A',     B' = [B, B - B_0]     A' = [A - A_0; A_0]

so that nothing large is subtracted from something large: where A = A_0 and B = B_0, it is zero to the last bit.

The experts of a mixture lie in a stack of matrices, each with factors of its own. A stack counts as one layer: its
|Delta W|^2 is the sum over its experts.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

LN2 = math.log(2.0)

Measure = Literal["delta", "factors"]

Origin = tuple[Tensor, Tensor] | None
"""(A_0, B_0), one of a layer or stacked; None where training started from zero."""


@dataclass(frozen=True)
class LowRankUpdate:
    """The factors of one layer's update: Delta W = scale * B A.

    Attributes:
        a: (rank, in) down-projection; of a stack (experts rank, in), expert by expert.
        b: (out, rank) up-projection; of a stack (out, rank experts), rank by rank: both as PEFT has them.
        scale: alpha / rank, or alpha / sqrt(rank).
        origin: (A_0, B_0) that training started from, of the same shapes and scale; None where that is zero. Where it
            is given, Delta W stands for s (B A - B_0 A_0) in all of this module.
        experts: matrices in the stack that is adapted; 0 where it is a matrix and no stack.
    """

    a: Tensor
    b: Tensor
    scale: float
    origin: tuple[Tensor, Tensor] | None = None
    experts: int = 0


def by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The factors of a stack, (experts, rank, in) and (experts, out, rank): views of PEFT's two matrices."""
    return a.reshape(experts, -1, a.shape[1]), b.reshape(len(b), -1, experts).permute(2, 0, 1)


def _as_peft_has_them(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of ``by_expert``."""
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


@contextmanager
def exact_products() -> Iterator[None]:
    """Products and convolutions of fp32 in fp32, where a run takes those of its model in TF32."""
    try:
        products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # as transformers does, who trains has set the newer switches, which hide the older ones
        with _exact_by_newer_switches():
            yield
        return
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def _exact_by_newer_switches() -> Iterator[None]:
    switches: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv")]  # noqa: B009 (mypy)
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


@exact_products()
def squared_norms(updates: Sequence[LowRankUpdate], measure: Measure = "delta") -> Tensor:
    """|Delta W_i|^2 of each layer, (layers,), without forming Delta W; or |A_i|^2 + |B_i|^2. Differentiable."""
    norms: dict[int, Tensor] = {}
    for layers in _alike(updates):
        a, b, scale, origin = _stacked(updates, layers)
        if measure == "factors":
            a, b = _moved(a, b, origin)
            batch = a.square().sum((-2, -1)) + b.square().sum((-2, -1))
        else:
            a, b = _difference(a, b, origin)
            # Never negative but for rounding, where A and B have moved and B A has not.
            batch = scale**2 * ((a @ a.mT) * (b.mT @ b)).sum((-2, -1)).clamp(min=0)
        batch = batch.sum() if updates[layers[0]].experts else batch
        norms |= zip(layers, batch.view(-1).unbind(), strict=True)
    return torch.stack([norms[layer] for layer in range(len(updates))])


def _alike(updates: Sequence[LowRankUpdate]) -> list[list[int]]:
    """The layers in batches for one product each: on a GPU those of equal shapes and scale, on a CPU every one alone.
    A stack of experts is a batch already.

    The products are small. A GPU waits for each launch; a CPU takes longer over a batch of narrow matrices than over
    the matrices one by one.
    """
    batches: dict[Any, list[int]] = {}
    for layer, u in enumerate(updates):
        alone = u.experts or u.a.device.type == "cpu"
        key = layer if alone else (u.a.shape, u.b.shape, u.scale, u.origin is None)
        batches.setdefault(key, []).append(layer)
    return list(batches.values())


def _stacked(updates: Sequence[LowRankUpdate], layers: list[int]) -> tuple[Tensor, Tensor, float, Origin]:
    """The factors of layers of a kind, (layers, rank, in) and (layers, out, rank), scale and origin; one alone 2-d.
    Of a stack of experts, (experts, rank, in) and (experts, out, rank)."""
    first = updates[layers[0]]
    if first.experts:
        origin = first.origin and by_expert(*first.origin, first.experts)
        return *by_expert(first.a, first.b, first.experts), first.scale, origin
    if len(layers) == 1:
        return first.a, first.b, first.scale, first.origin
    a, b = (torch.stack(tensors) for tensors in zip(*((updates[i].a, updates[i].b) for i in layers), strict=True))
    origins = [origin for i in layers if (origin := updates[i].origin)]
    origin = (torch.stack([a0 for a0, _ in origins]), torch.stack([b0 for _, b0 in origins])) if origins else None
    return a, b, first.scale, origin


def _difference(a: Tensor, b: Tensor, origin: Origin) -> tuple[Tensor, Tensor]:
    """(A', B'), (..., 2 rank, in) and (..., out, 2 rank), whose product is B A - B_0 A_0."""
    if origin is None:
        return a, b
    a0, b0 = origin
    return torch.cat([a - a0, a0], -2), torch.cat([b, b - b0], -1)


def _moved(a: Tensor, b: Tensor, origin: Origin) -> tuple[Tensor, Tensor]:
    """How far the factors themselves have moved."""
    return (a, b) if origin is None else (a - origin[0], b - origin[1])


def layer_npt(updates: Sequence[LowRankUpdate], sigma: float, n_tokens: int, measure: Measure = "delta") -> Tensor:
    """Nats per token that describe each layer's adapter, (layers,); their sum is ParamNPT.

    Args:
        updates: the adapted layers.
        sigma: standard deviation of the prior on the entries of Delta W.
        n_tokens: N, the tokens that the description is spread over.
        measure: of Delta W, or of its factors.
    """
    return squared_norms(updates, measure) / (2 * sigma**2 * n_tokens)


@exact_products()
def penalty_gradient(
    updates: Sequence[LowRankUpdate], sigma: float, n_tokens: int, measure: Measure = "delta"
) -> list[tuple[Tensor, Tensor]]:
    """The closed-form gradient of ParamNPT by (A_i, B_i) for each layer, in nats per token.

        d/dA_i = s_i^2 / (sigma^2 N) (B_i^T B_i') A_i'      d/dB_i = s_i^2 / (sigma^2 N) B_i' (A_i' A_i^T)

    where A_i' = A_i and B_i' = B_i unless training started from an adapter. For the measure "factors" they are
    A_i / (sigma^2 N) and B_i / (sigma^2 N), of which an adapter at the start is subtracted. No autograd graph is built.
    At the start of training the first two are zero: B = 0, or A' B' = 0.
    """
    unit = 1 / (sigma**2 * n_tokens)
    gradients: dict[int, tuple[Tensor, Tensor]] = {}
    for layers in _alike(updates):
        a, b, scale, origin = _stacked(updates, layers)
        a, b = a.detach(), b.detach()
        if measure == "factors":
            by_a, by_b = (unit * moved for moved in _moved(a, b, origin))
        else:
            weight = scale**2 * unit
            a_, b_ = _difference(a, b, origin)
            by_a, by_b = (weight * (b.mT @ b_)) @ a_, b_ @ (weight * (a_ @ a.mT))
        if updates[layers[0]].experts:
            by_a, by_b = _as_peft_has_them(by_a, by_b)
        pairs = [(by_a, by_b)] if len(layers) == 1 else zip(by_a.unbind(), by_b.unbind(), strict=True)
        gradients |= zip(layers, pairs, strict=True)
    return [gradients[layer] for layer in range(len(updates))]


def weighted_penalty(
    updates: Sequence[LowRankUpdate],
    lams: Sequence[float],
    sigma: float,
    n_tokens: int,
    measure: Measure = "delta",
) -> list[Tensor]:
    """The gradient of sum_i lambda_i ParamNPT_i: by A and by B of the first layer, of the second, and so on.

    Args:
        updates: the adapted layers.
        lams: lambda of each layer.
        sigma: as of ``penalty_gradient``.
        n_tokens: likewise.
        measure: likewise.
    """
    pairs = penalty_gradient(updates, sigma, n_tokens, measure)
    gradients = [gradient for pair in pairs for gradient in pair]
    torch._foreach_mul_(gradients, [lam for lam in lams for _ in ("a", "b")])
    return gradients


def decay(lam: float, learning_rate: float, sigma: float, n_tokens: int, measure: Measure = "delta") -> float:
    """What the decoupled actuator multiplies A and B by after a step of that learning rate.

    A step of gradient descent on lambda * ParamNPT over Delta W itself, taken exactly (the flow, not its first-order
    step), shrinks Delta W by rho = exp(-lr lambda / (sigma^2 N)), whatever the optimizer makes of the data's gradient
    (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019). Each factor takes the root of it; of the
    measure "factors", whose flow is that of A and B themselves, the whole. At most
    half of a factor is taken in a step, so that no lambda can kill an adapter at once.
    """
    exponent = learning_rate * lam / (sigma**2 * n_tokens)
    return max(0.5, math.exp(-exponent if measure == "factors" else -exponent / 2))


def scale_onto(param_bpt: Tensor, bound: float, measure: Measure = "delta") -> Tensor:
    """What every A and B is multiplied by so that an adapter costs no more than ``bound``; 1 where it does not.

    The shares of the matrices scale alike, so one factor brings their sum onto the bound. |Delta W|^2 is of fourth
    order in the factors' common scale, |A|^2 + |B|^2 of second.

    Args:
        param_bpt: what the adapter costs, a scalar, in the unit of ``bound``.
    """
    return (param_bpt / bound).clamp(min=1.0) ** (-0.25 if measure == "delta" else -0.5)


def bits(nats: float) -> float:
    """Nats as bits."""
    return nats / LN2


def information_ratio(data_bpt: float, param_bpt: float) -> float:
    """S = ParamBPT / (DataBPT + ParamBPT); zero where both are."""
    total = data_bpt + param_bpt
    return param_bpt / total if total else 0.0
