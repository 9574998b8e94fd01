r"""What the adapter costs and what the data costs, in bits per token.

For each adapted layer i with factors A_i (rank x in), B_i (out x rank) and scale s_i = alpha / rank,
the update is Delta W_i = s_i B_i A_i, and under the prior N(0, sigma^2) on its entries, spread over N tokens,

    ParamNPT = sum_i |Delta W_i|^2 / (2 sigma^2 N)           nats per token
    ParamBPT = ParamNPT / ln 2        DataBPT = cross-entropy / ln 2
    S        = ParamBPT / (DataBPT + ParamBPT)

Measured on Delta W and not on the factors: it is zero before training, and the same for every (A, B) that
gives the same model. Delta W is never formed: |B A|^2 = sum (A A^T o B^T B), two rank x rank products.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LN2 = math.log(2.0)


@dataclass(frozen=True)
class LowRankUpdate:
    """The factors of one layer's update: Delta W = scale * B A.

    Attributes:
        a: (rank, in) down-projection.
        b: (out, rank) up-projection.
        scale: alpha / rank.
    """

    a: Tensor
    b: Tensor
    scale: float


def squared_norms(updates: Sequence[LowRankUpdate]) -> Tensor:
    """|Delta W_i|^2 of each layer, (layers,), without forming Delta W. Differentiable."""
    return torch.stack([u.scale**2 * ((u.a @ u.a.T) * (u.b.T @ u.b)).sum() for u in updates])


def param_npt(updates: Sequence[LowRankUpdate], sigma: float, n_tokens: int) -> Tensor:
    """Nats per token that describe the adapter: a scalar tensor.

    Args:
        updates: the adapted layers.
        sigma: standard deviation of the prior on the entries of Delta W.
        n_tokens: N, the tokens that the description is spread over.
    """
    return squared_norms(updates).sum() / (2 * sigma**2 * n_tokens)


def penalty_gradient(updates: Sequence[LowRankUpdate], sigma: float, n_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """The closed-form gradient of ``param_npt`` by (A_i, B_i) for each layer, in nats per token.

        d/dA_i = s_i^2 / (sigma^2 N) (B_i^T B_i) A_i        d/dB_i = s_i^2 / (sigma^2 N) B_i (A_i A_i^T)

    No autograd graph is built. Where B = 0, as at the start of training, both are zero.
    """
    gradients = []
    for u in updates:
        a, b = u.a.detach(), u.b.detach()
        weight = u.scale**2 / (sigma**2 * n_tokens)
        gradients.append((weight * ((b.T @ b) @ a), weight * (b @ (a @ a.T))))
    return gradients


def bits(nats: float) -> float:
    """Nats as bits."""
    return nats / LN2


def information_ratio(data_bpt: float, param_bpt: float) -> float:
    """S = ParamBPT / (DataBPT + ParamBPT); zero where both are."""
    total = data_bpt + param_bpt
    return param_bpt / total if total else 0.0
