"""The Mamba-2 state-space scan in plain PyTorch, chunked, with a backward pass of its own.

Per head, with state H in R^{N x P}, step size dt_t, decay rate A < 0 and token inputs x_t, B_t, C_t:

    H_t = exp(dt_t A) H_{t-1} + dt_t B_t x_t^T          y_t = H_t^T C_t + D x_t

(Dao and Gu 2024, arXiv 2405.21060, section 6: the block decomposition of the semiseparable matrix.)

Three things make it fast and small where the reference is neither. B and C belong to a group of heads, so B and C are
contracted once per group and the states of all its heads read and written by one matrix product. Backward keeps the
inputs and the state at each chunk's start, and computes the rest again: autograd would keep half a dozen tensors of
(time, chunk) per head. And on a CPU the chunks are taken one after the other, so that what is made of a chunk is
still in cache when it is used.

Shapes below: Z batch, K chunks of a span, G groups, H heads of a group, L tokens of a chunk, N state, P head dimension.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
"""Tokens per chunk. The quadratic part costs O(chunk) a token, the state part O(1/chunk)."""


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    chunk: int | None = None,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Run the scan.

    Args:
        x: (batch, time, heads, head_dim) inputs. Their dtype, or autocast's, is that of the matrix products.
        dt: (batch, time, heads) step sizes, positive, after softplus and clamping.
        a: (heads,) decay rates, negative.
        b: (batch, time, groups, state) input projections; ``groups`` divides ``heads``.
        c: (batch, time, groups, state) output projections.
        d: (heads,) skip connection.
        chunk: tokens per chunk; the result does not depend on it. None takes what is fastest.
        seq_idx: (batch, time) numbers of documents; where the number changes, the state starts from zero.
        initial_state: (batch, heads, head_dim, state), the state before the first token; None is zero.
        return_state: also return the state after the last token, as ``initial_state``, in fp32.

    Returns:
        (batch, time, heads, head_dim) outputs in fp32 (fp64 for fp64 inputs), and the state where asked for. Decays,
        sums and the carried state are never less than fp32.
    """
    batch, time, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    wide = torch.promote_types(x.dtype, torch.float32)
    chunk = min(chunk or CHUNK, time)
    runs = None if seq_idx is None else _runs(seq_idx)
    if initial_state is None:
        carried = x.new_zeros(batch, groups, state, heads // groups * head_dim, dtype=wide)
    else:
        carried = initial_state.to(wide).unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3).flatten(3)
    if pad := -time % chunk:  # a padded step has dt = 0: it neither decays the state nor adds to it
        x, dt, b, c = (F.pad(t, [0, 0] * (t.dim() - 2) + [0, pad]) for t in (x, dt, b, c))
        runs = None if runs is None else torch.cat([runs, runs[:, -1:].expand(-1, pad)], 1)
    x, dt, a, d = (t.unflatten(-2 if t is x else -1, (groups, -1)) for t in (x, dt, a, d))
    x, dt, b, c = (t.unflatten(1, (-1, chunk)) for t in (x.to(dtype), dt.to(wide), b.to(dtype), c.to(dtype)))
    runs = None if runs is None else runs.unflatten(1, (-1, chunk))
    with torch.autocast(device, enabled=False):
        y, carried = _Scan.apply(x, dt, a.to(wide), b, c, d.to(wide), carried, runs)
    y = y.flatten(1, 2).flatten(2, 3)[:, :time]
    if not return_state:
        return y
    return y, carried.unflatten(3, (-1, head_dim)).permute(0, 1, 3, 4, 2).flatten(1, 2)


def _runs(seq_idx: Tensor) -> Tensor:
    """Documents counted from 0 in the order in which they come, (batch, time): a number may come back later."""
    return F.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).long().cumsum(1), (1, 0))


class _Scan(torch.autograd.Function):
    """The scan over whole chunks.

    x and y are (Z, K, L, G, H, P), dt is (Z, K, L, G, H), b and c are (Z, K, L, G, N), a and d are (G, H), the states
    carried in and out (Z, G, N, H P), runs (Z, K, L) or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        carried: Tensor,
        runs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        log_decay, decays = _decays(dt, a, runs)
        y = x.new_empty(x.shape, dtype=dt.dtype)
        starts = x.new_empty(*x.shape[:2], *carried.shape[1:])
        for span in _spans(x):
            x_, dt_, b_, c_ = (_by_group(t[:, span]) for t in (x, dt, b, c))
            decay = decays.at(span)
            x_dt = x_ * dt_.unsqueeze(-1)
            added = b_.mT @ _flat(x_dt * decay.to_end.unsqueeze(-1)).to(x.dtype)
            for i in range(added.shape[1]):
                starts[:, span.start + i] = carried
                carried = _scaled(carried, decay.whole[:, i]) + added[:, i]
            weights = _kernel(log_decay[:, span], _at(runs, span)).mul_((c_ @ b_.mT).unsqueeze(3))
            within = weights.to(x.dtype) @ x_dt.to(x.dtype).transpose(3, 4)  # (Z, K, G, H, L, P)
            across = (c_ @ starts[:, span]).unflatten(-1, x.shape[-2:])
            out = across * decay.from_start.unsqueeze(-1)
            out += within.transpose(3, 4)
            y[:, span] = _by_group(out.addcmul_(x_.to(dt.dtype), d[:, None, :, None]))
        ctx.save_for_backward(x, dt, a, b, c, d, starts, runs)
        return y, carried

    @staticmethod
    def backward(ctx: Any, dy: Tensor, d_carried: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, d, starts, runs = ctx.saved_tensors
        log_decay, decays = _decays(dt, a, runs)
        dx, d_dt, d_log, db, dc = (torch.empty_like(t) for t in (x, dt, dt, b, c))
        for span in reversed(_spans(x)):
            x_, dt_, b_, c_, dy_ = (_by_group(t[:, span]) for t in (x, dt, b, c, dy))
            decay, start = decays.at(span), starts[:, span]
            x_dt, narrow_dy = (x_ * dt_.unsqueeze(-1)), dy_.to(x.dtype)

            # Through the state: what was read at each token, what each token added, and the decay of the whole chunk.
            d_read = dy_ * decay.from_start.unsqueeze(-1)
            read = (c_ @ start).unflatten(-1, x.shape[-2:])
            d_log_ = (d_read * read).sum(-1)  # (Z, K, G, L, H)
            d_read = _flat(d_read).to(x.dtype)
            d_start = c_.mT @ d_read
            d_end = torch.empty_like(start, dtype=dt.dtype)
            for i in reversed(range(start.shape[1])):
                d_end[:, i] = d_carried
                d_carried = _scaled(d_carried, decay.whole[:, i]) + d_start[:, i]
            added = x_dt * decay.to_end.unsqueeze(-1)
            narrow_end = d_end.to(x.dtype)
            d_added = (b_ @ narrow_end).unflatten(-1, x.shape[-2:])
            dc_, db_ = d_read @ start.mT, _flat(added).to(x.dtype) @ narrow_end.mT
            d_to_end = (d_added * added).sum(-1)
            d_whole = (d_end * start).unflatten(-1, x.shape[-2:]).sum((-3, -1)) * decay.whole
            d_log_ -= d_to_end
            d_log_[..., -1, :] += d_to_end.sum(-2) + d_whole

            # Within the chunk: weights[l, s] = kernel[l, s] scores[l, s].
            kernel, scores = _kernel(log_decay[:, span], _at(runs, span)), (c_ @ b_.mT).unsqueeze(3)
            d_within, within = narrow_dy.transpose(3, 4), x_dt.to(x.dtype).transpose(3, 4)
            d_weights = kernel * (d_within @ within.mT)
            d_scores = d_weights.sum(3).to(x.dtype)
            dc_, db_ = dc_ + d_scores @ b_, db_ + d_scores.mT @ c_
            d_weights *= scores
            d_log_ += (d_weights.sum(-1) - d_weights.sum(-2)).mT
            kernel *= scores
            d_x_dt = (kernel.to(x.dtype).mT @ d_within).transpose(3, 4) + d_added * decay.to_end.unsqueeze(-1)

            dx[:, span] = _by_group(d_x_dt * dt_.unsqueeze(-1) + dy_ * d[:, None, :, None])
            d_dt[:, span] = _by_group((d_x_dt * x_).sum(-1))
            d_log[:, span], db[:, span], dc[:, span] = _by_group(d_log_), _by_group(db_), _by_group(dc_)
        d_steps = _sums(d_log, ahead=True)
        da = (d_steps * dt).sum((0, 1, 2)) if ctx.needs_input_grad[2] else None
        dd = (dy * x).sum((0, 1, 2, 5)) if ctx.needs_input_grad[5] else None
        return dx, d_dt.addcmul_(d_steps, a), da, db, dc, dd, d_carried, None


def _spans(x: Tensor) -> list[slice]:
    """Slices of chunks that are worked on together: one on a CPU, for its cache; all where a launch costs more."""
    count = x.shape[1]
    together = 1 if x.device.type == "cpu" and not torch.compiler.is_compiling() else count
    return [slice(k, k + together) for k in range(0, count, together)]


class _Decays(NamedTuple):
    """What the carried state is multiplied by: from_start and to_end (Z, K, G, L, H), whole (Z, K, G, H)."""

    from_start: Tensor
    to_end: Tensor
    whole: Tensor

    def at(self, span: slice) -> "_Decays":
        return _Decays(*(t[:, span] for t in self))


def _decays(dt: Tensor, a: Tensor, runs: Tensor | None) -> tuple[Tensor, _Decays]:
    """The logarithm of the decay from a chunk's start up to and with each token, (Z, K, G, H, L), and the decays."""
    log_decay = _by_group(_sums(dt * a))
    from_start, to_end = log_decay.exp(), (log_decay[..., -1:, :] - log_decay).exp()
    if runs is not None:  # what crosses a document's start is cut, not decayed
        before = torch.cat([runs[:, :1, 0], runs[:, :-1, -1]], 1).unsqueeze(-1)  # the token before each chunk
        from_start = from_start * (runs == before)[:, :, None, :, None]
        to_end = to_end * (runs == runs[..., -1:])[:, :, None, :, None]
    return log_decay.mT.contiguous(), _Decays(from_start, to_end, from_start[..., -1, :])


def _sums(steps: Tensor, ahead: bool = False) -> Tensor:
    """Sums over a chunk's tokens up to and with each, or from each to the end. (Z, K, L, G, H) in and out"""
    # A product with ones and not cumsum: that adds in no fixed order on CUDA, and --deterministic refuses it.
    length = steps.shape[2]
    ones = steps.new_ones(length, length)
    return torch.einsum("ls,zksgh->zklgh", ones.triu() if ahead else ones.tril(), steps)


def _kernel(log_decay: Tensor, runs: Tensor | None) -> Tensor:
    """The decay from token s to token l of a chunk, zero where l is before s or in another document.

    (Z, K, G, H, L) and (Z, K, L) in, (Z, K, G, H, L, L) out.
    """
    length = log_decay.shape[-1]
    cut = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    if runs is not None:
        cut = (cut | (runs.unsqueeze(-1) != runs.unsqueeze(-2)))[:, :, None, None]
    # Masked before the exponential: above the diagonal the exponent is positive and may overflow.
    return (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).masked_fill_(cut, -torch.inf).exp_()


def _by_group(t: Tensor) -> Tensor:
    """(Z, K, L, G, ...) as (Z, K, G, L, ...), and back."""
    return t.transpose(2, 3)


def _flat(t: Tensor) -> Tensor:
    return t.flatten(-2)


def _at(t: Tensor | None, span: slice) -> Tensor | None:
    return None if t is None else t[:, span]


def _scaled(state: Tensor, decay: Tensor) -> Tensor:
    """A state (Z, G, N, H P), each head times its decay (Z, G, H)."""
    heads = decay.shape[-1]
    return (state.unflatten(-1, (heads, -1)) * decay[:, :, None, :, None]).flatten(-2)
