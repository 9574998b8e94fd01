"""The Mamba-2 state-space scan in plain PyTorch, chunked, for training and scoring.

Per head, with state H in R^{P x N}, step size dt_t, decay rate A < 0 and token inputs x_t, B_t, C_t:

    H_t = exp(dt_t A) H_{t-1} + dt_t x_t B_t^T          y_t = H_t C_t + D x_t

(Dao and Gu 2024, arXiv 2405.21060, section 6: the block decomposition of the semiseparable matrix.)
B and C belong to a group of heads, so C B^T is contracted once per group and not once per head:
that, and a chunk length chosen for the cost and not for the CUDA kernel, is where the time goes
in the reference implementation.
"""

import torch
from torch import Tensor

CHUNK = 64
"""Tokens per chunk. The quadratic part costs O(chunk) a token, the state part O(1/chunk)."""


def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk: int = CHUNK) -> Tensor:
    """Run the scan from a zero state.

    Args:
        x: (batch, time, heads, head_dim) inputs.
        dt: (batch, time, heads) step sizes, positive, after softplus and clamping.
        a: (heads,) decay rates, negative.
        b: (batch, time, groups, state) input projections; ``groups`` divides ``heads``.
        c: (batch, time, groups, state) output projections.
        d: (heads,) skip connection.
        chunk: tokens per chunk; the result does not depend on it.

    Returns:
        (batch, time, heads, head_dim) outputs in fp32. Decays and carried states are always fp32;
        the matrix products follow autocast.
    """
    batch, time, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    pad = -time % chunk
    if pad:  # a padded step has dt = 0: it neither decays the state nor adds to it
        x, dt, b, c = (torch.nn.functional.pad(t, [0, 0] * (t.dim() - 2) + [0, pad]) for t in (x, dt, b, c))
    shape = (batch, -1, chunk, groups, heads // groups)
    x = x.reshape(*shape, head_dim)  # (B, C, L, G, H, P)
    b, c = (t.reshape(batch, -1, chunk, groups, state) for t in (b, c))
    dt = dt.float().reshape(shape)
    log_decay = _running_sum(dt * a.float().view(groups, -1))  # (B, C, L, G, H), from the chunk's start

    y = _within_chunks(x, dt, log_decay, b, c) + _across_chunks(x, dt, log_decay, b, c)
    y = y + x.float() * d.float().view(groups, -1, 1)
    return y.reshape(batch, -1, heads, head_dim)[:, :time]


def _running_sum(steps: Tensor) -> Tensor:
    """The sum over a chunk's tokens up to and with each, in fp32. (B, C, L, G, H) in and out"""
    # A product with ones and not cumsum: that adds in no fixed order on CUDA, and --deterministic refuses it.
    length = steps.shape[2]
    up_to = steps.new_ones(length, length).tril()
    with torch.autocast(steps.device.type, enabled=False):  # the decays are differences of these sums
        return torch.einsum("ls,zksgh->zklgh", up_to, steps)


def _within_chunks(x: Tensor, dt: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """What the tokens of a chunk give to one another: a decayed, causal attention. (B, C, L, G, H, P)"""
    decay = log_decay.permute(0, 1, 3, 4, 2)  # (B, C, G, H, L)
    # Masked before the exponential: above the diagonal the exponent is positive and may overflow.
    length = decay.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    exponent = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(future, -torch.inf)  # (B, C, G, H, L, S)
    scores = torch.einsum("zklgn,zksgn->zkgls", c, b)
    weights = exponent.exp() * scores.unsqueeze(3) * dt.permute(0, 1, 3, 4, 2).unsqueeze(-2)
    return torch.matmul(weights.to(x.dtype), x.permute(0, 1, 3, 4, 2, 5)).permute(0, 1, 4, 2, 3, 5).float()


def _across_chunks(x: Tensor, dt: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """What earlier chunks give to a chunk, through the state carried over its start. (B, C, L, G, H, P)"""
    to_end = (log_decay[:, :, -1:] - log_decay).exp() * dt
    added = torch.einsum("zksgn,zksghp->zkghpn", b, (x * to_end.unsqueeze(-1)).to(x.dtype)).float()
    chunk_decay = log_decay[:, :, -1].exp()[..., None, None]  # (B, C, G, H, 1, 1)
    carried, states = torch.zeros_like(added[:, 0]), []
    for k in range(added.shape[1]):
        states.append(carried)
        carried = chunk_decay[:, k] * carried + added[:, k]
    read = torch.einsum("zklgn,zkghpn->zklghp", c, torch.stack(states, 1).to(c.dtype))
    return read.float() * log_decay.exp().unsqueeze(-1)
