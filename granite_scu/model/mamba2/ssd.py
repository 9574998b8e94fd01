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
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from granite_scu.model.mamba2.tiling import kind_of, pieces, put

CHUNK, LONG_CHUNK = 64, 128
"""Tokens per chunk on a CPU and on a GPU. What is quadratic in a chunk costs O(chunk) a token, its state O(1/chunk): of
heads with a state of 128 x 64, a GPU moves least at 128, and a CPU multiplies fastest at 64."""

UNITS = {torch.float16: 2.0**-6}
"""What a state is multiplied by where it is kept in a dtype. fp16 has no number above 65,504, and the state of a slow
head adds up over thousands of tokens. What one chunk adds to it stays as it is: smaller, it would lose accuracy."""


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    chunk: int | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Run the scan.

    Args:
        x: (batch, time, heads, head_dim) inputs. Their dtype, or autocast's, is that of the matrix products.
        dt: (batch, time, heads) step sizes, positive, after softplus and clamping. 0 counts as padding: it gets no
            gradient of its own.
        a: (heads,) decay rates, negative.
        b: (batch, time, groups, state) input projections; ``groups`` divides ``heads``.
        c: (batch, time, groups, state) output projections.
        d: (heads,) skip connection.
        chunk: tokens per chunk; the result does not depend on it. None takes what suits the device.
        seq_idx: (batch, time) numbers of documents, as ``runs_of`` counts them: none comes back later. Where the number
            changes, the state starts from zero.

    Returns:
        (batch, time, heads, head_dim) outputs in fp32 (fp64 for fp64 inputs). Decays, sums and the carried state are
        never less than fp32.
    """
    inputs = _in_chunks(x, dt, a, b, c, d, chunk, seq_idx)
    with torch.autocast(x.device.type, enabled=False):
        y = _Scan.apply(*inputs)
    return y.flatten(1, 2).flatten(2, 3)[:, : x.shape[1]]


def ssd_scan_with_state(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """As ``ssd_scan``, without gradients: its outputs, and the state behind the last token.

    Returns:
        (batch, time, heads, head_dim) and (batch, heads, head_dim, state), both in fp32 (fp64 for fp64 inputs).
    """
    inputs = _in_chunks(x, dt, a, b, c, d, None, None)
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        y, _, state = _Scan._forward(*inputs)
    state = state.unflatten(-1, (-1, x.shape[-1])).permute(0, 1, 3, 4, 2).flatten(1, 2)
    return y.flatten(1, 2).flatten(2, 3)[:, : x.shape[1]], state.contiguous()


def scan_next(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """A further token of ``ssd_scan_with_state``, without its axis of time.

    Args:
        state: (batch, heads, head_dim, state), contiguous, which is written to.
        x, dt, a, b, c, d: as of ``ssd_scan``.

    Returns:
        (batch, heads, head_dim) in the dtype of the state.
    """
    x, b, c = (t.to(state.dtype) for t in (x, b, c))
    state.mul_((dt * a).exp()[..., None, None])
    of_groups = state.unflatten(1, (b.shape[1], -1))  # (batch, groups, heads, head_dim, state), the same memory
    of_groups.addcmul_((x * dt.unsqueeze(-1)).unflatten(1, (b.shape[1], -1)).unsqueeze(-1), b[:, :, None, None])
    y = c.unsqueeze(2) @ of_groups.flatten(2, 3).mT  # in this order: PyTorch multiplies by a vector on the right slowly
    return y.view(x.shape).addcmul_(x, d.unsqueeze(-1))


def _in_chunks(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk: int | None, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments of ``ssd_scan`` as ``_Scan`` takes them, the last chunk padded."""
    time, groups = x.shape[1], b.shape[2]
    if time < 1 or (chunk is not None and chunk < 1):
        raise ValueError(f"a scan of {time} tokens in chunks of {chunk}: both must be at least 1")
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    wide = torch.promote_types(x.dtype, torch.float32)
    chunk = min(chunk or _chunk_on(x.device, time), time)
    runs = seq_idx
    if pad := -time % chunk:  # a padded step has dt = 0: it neither decays the state nor adds to it
        x, dt, b, c = (F.pad(t, [0, 0] * (t.dim() - 2) + [0, pad]) for t in (x, dt, b, c))
        runs = None if runs is None else torch.cat([runs, runs[:, -1:].expand(-1, pad)], 1)
    x, dt, a, d = (t.unflatten(-2 if t is x else -1, (groups, -1)) for t in (x, dt, a, d))
    x, dt, b, c = (t.unflatten(1, (-1, chunk)) for t in (x.to(dtype), dt.to(wide), b.to(dtype), c.to(dtype)))
    runs = None if runs is None else runs.unflatten(1, (-1, chunk))
    if torch.compiler.is_compiling():
        # Each as the products take it, and nothing else written or kept: not the one tensor that they are parts of.
        x, b, c = _by_group(_by_head(_by_group(x)).transpose(3, 4)), b.contiguous(), c.contiguous()
    return x, dt, a.to(wide), b, c, d.to(wide), runs


def _chunk_on(device: torch.device, time: int) -> int:
    """Tokens per chunk where nobody gives them: the long ones on a GPU, unless they would be padded more.

    Or are eight or fewer: Inductor then computes the state before each of them from the first, for every number of it.
    """
    is_long = kind_of(device) != "cpu" and time > 8 * LONG_CHUNK and -time % LONG_CHUNK == -time % CHUNK
    return LONG_CHUNK if is_long else CHUNK


class _Scan(torch.autograd.Function):
    """The scan over whole chunks.

    x and y are (Z, K, L, G, H, P), dt is (Z, K, L, G, H), b and c are (Z, K, L, G, N), a and d are (G, H), the state
    that is carried from chunk to chunk (Z, G, N, H P), runs (Z, K, L) or None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, runs: Tensor | None
    ) -> Tensor:
        y, starts, _ = _Scan._forward(x, dt, a, b, c, d, runs)
        ctx.save_for_backward(x, dt, a, b, c, d, starts, runs)
        return y

    @staticmethod
    def _forward(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, runs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs, the states at the chunks' starts (Z, K, G, N, H P), and the one that is carried at the end."""
        decays, unit = _decays(dt, a, runs), UNITS.get(x.dtype, 1.0)
        y = x.new_empty(x.shape, dtype=dt.dtype)
        starts = x.new_empty(*x.shape[:2], a.shape[0], b.shape[-1], a.shape[1] * x.shape[-1])
        carried = torch.zeros_like(starts[:, 0], dtype=dt.dtype)
        for span in _spans(x):
            x_, b_, c_ = (_by_group(t[:, span]) for t in (x, b, c))
            decay = decays.at(span)
            added = b_.mT @ (x_ * decay.to_end.unsqueeze(-1)).to(x.dtype).flatten(-2)
            carried, begins = _beside(added[:, 0], carried), []
            for i in range(added.shape[1]):
                begins.append(_times(carried, unit).to(x.dtype))
                carried = _decayed(carried, decay.whole[:, i], added[:, i])
            starts = put(starts, span, _stacked(begins))
            weights = _weights(_kernel(decay), (c_ @ b_.mT).unsqueeze(3), d)
            within = weights.to(x.dtype) @ _by_head(x_)  # (Z, K, G, H, L, P)
            across = (c_ @ starts[:, span]).unflatten(-1, x.shape[-2:])
            across = _times(across * decay.from_start.unsqueeze(-1), 1 / unit)
            y = put(y, span, _by_group(across.add_(within.transpose(3, 4))))
        return y, starts, carried

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(dy.device.type, enabled=False):
            return _Scan._backward(ctx, dy)

    @staticmethod
    def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, d, starts, runs = ctx.saved_tensors
        d_carried = torch.zeros_like(starts[:, 0], dtype=dt.dtype)
        decays, per_unit = _decays(dt, a, runs), 1 / UNITS.get(x.dtype, 1.0)
        # For the rates: what a strong decay adds to one sum it takes from another, and only fp64 leaves nothing of it.
        sums = torch.float64 if ctx.needs_input_grad[2] else dt.dtype
        dx, d_log_dt, db, dc = (torch.empty_like(t) for t in (x, dt, b, c))
        d_log_decay = torch.empty_like(dt, dtype=sums)
        for span in reversed(_spans(x)):
            x_, b_, c_, dy_ = (_by_group(t[:, span]) for t in (x, b, c, dy))
            decay, start = decays.at(span), starts[:, span]

            # Through the state: what was read at each token, what each token added, and the decay of the whole chunk.
            d_read = dy_ * decay.from_start.unsqueeze(-1)
            read = (c_ @ start).unflatten(-1, x.shape[-2:])
            from_read = _times((d_read * read).sum(-1), per_unit)  # (Z, K, G, L, H)
            d_read = d_read.to(x.dtype).flatten(-2)
            d_start = c_.mT @ d_read
            d_carried, ends = _beside(d_start[:, -1], d_carried), []
            for i in reversed(range(start.shape[1])):
                ends.insert(0, d_carried.to(x.dtype))
                d_carried = _decayed(d_carried, decay.whole[:, i], d_start[:, i])
            d_end, added = _stacked(ends), (x_ * decay.to_end.unsqueeze(-1)).to(x.dtype)
            # The smaller factor on the right: half-precision products copy a transposed one.
            dc_, db_ = _times(start @ d_read.mT, per_unit).mT, (d_end @ added.flatten(-2).mT).mT
            dx_ = (b_ @ d_end).unflatten(-1, x.shape[-2:]) * decay.to_end.unsqueeze(-1)
            from_added = (dx_ * x_).sum(-1)
            through = (d_end.to(dt.dtype) * start).unflatten(-1, x.shape[-2:]).sum((-3, -1))
            from_whole = _times(through, per_unit) * decay.whole

            # Within the chunk: y = weights x, and weights = kernel scores + the skip connection.
            kernel, scores = _kernel(decay), (c_ @ b_.mT).unsqueeze(3)
            d_within, within = dy_.transpose(3, 4).to(x.dtype), _by_head(x_)
            d_kernel = kernel * (d_within @ within.mT)
            d_scores = d_kernel.sum(3).to(x.dtype)
            d_kernel *= scores  # by the logarithm of the kernel, in fact
            to_rows, to_columns = (d_kernel.sum(dim, dtype=sums).mT for dim in (-1, -2))
            dx_ += (_weights(kernel, scores, d).to(x.dtype).mT @ d_within).transpose(3, 4)

            from_log = to_rows - to_columns + from_read - from_added
            from_log[..., -1, :] += from_added.sum(-2, dtype=sums) + from_whole
            dx, db = put(dx, span, _by_group(dx_)), put(db, span, _by_group(db_ + d_scores.mT @ c_))
            dc = put(dc, span, _by_group(dc_ + d_scores @ b_))
            d_log_decay = put(d_log_decay, span, _by_group(from_log))
            d_log_dt = put(d_log_dt, span, _by_group(from_added + to_columns))
        d_steps = _sums(d_log_decay, ahead=True)
        d_dt = torch.where(dt > 0, d_log_dt / dt, 0).addcmul_(d_steps.to(dt.dtype), a)
        da = (d_steps * dt).sum((0, 1, 2)).to(a.dtype) if ctx.needs_input_grad[2] else None
        dd = (dy * x).sum((0, 1, 2, 5)) if ctx.needs_input_grad[5] else None
        return dx, d_dt, da, db, dc, dd, None


def _times(t: Tensor, factor: float) -> Tensor:
    """``t`` in other units; where they are the same no operator runs."""
    return t if factor == 1 else t * factor


def _spans(x: Tensor) -> list[slice]:
    """Slices of chunks that are worked on together: one on a CPU, for its cache; all where a launch costs more."""
    return pieces(x.shape[1], 1, x.device)


class _Decays(NamedTuple):
    """The decays of every chunk.

    Attributes:
        from_start: of what is carried into the chunk, at each token. (Z, K, G, L, H)
        to_end: of what each token adds to the state, times its step size. (Z, K, G, L, H)
        whole: of what is carried through the chunk. (Z, K, G, H)
        rows: logarithm of the decay from the chunk's start up to and with each token. (Z, K, G, H, L)
        rest: what ``rows`` lost when it was rounded. Of two large sums the difference counts, and may be small.
        steps: step sizes. (Z, K, G, H, L)
        cut: pairs (l, s) of tokens, of which l gets nothing from s; (L, L) or (Z, K, 1, 1, L, L).
    """

    from_start: Tensor
    to_end: Tensor
    whole: Tensor
    rows: Tensor
    rest: Tensor
    steps: Tensor
    cut: Tensor

    def at(self, span: slice) -> "_Decays":
        *per_chunk, cut = self
        return _Decays(*(t[:, span] for t in per_chunk), cut if cut.dim() == 2 else cut[:, span])


def _decays(dt: Tensor, a: Tensor, runs: Tensor | None) -> _Decays:
    # Summed in fp64: after a strong decay all later sums of the chunk are large, and their differences small.
    log_decay, dt_ = _by_group(_sums(dt.double() * a.double())), _by_group(dt)
    length = dt.shape[2]
    rows = log_decay.to(dt.dtype)
    rest = (log_decay - rows).to(dt.dtype)
    if torch.compiler.is_compiling():  # a kernel computes it for each number: exponentials of fp64 would be slow
        from_start, to_end = rows.exp(), (rows[..., -1:, :] - rows + (rest[..., -1:, :] - rest)).exp()
    else:
        from_start, to_end = log_decay.exp().to(dt.dtype), (log_decay[..., -1:, :] - log_decay).exp().to(dt.dtype)
    cut = torch.ones(length, length, dtype=torch.bool, device=dt.device).triu(1)
    if runs is not None:  # what crosses a document's start is cut, not decayed
        # By differences and an index as large as ``runs``, which the compiler computes again and does not keep.
        ends = torch.arange(0, runs[0].numel(), length, dtype=torch.int32, device=dt.device) - 1
        before = runs.flatten(1)[:, ends.clamp(0).unsqueeze(1).expand(runs.shape[1:])]  # the token before each chunk
        from_start = from_start * (runs - before == 0)[:, :, None, :, None]
        to_end = to_end * (runs - runs[..., -1:] == 0)[:, :, None, :, None]
        cut = (cut | (runs.unsqueeze(-1) != runs.unsqueeze(-2)))[:, :, None, None]
    rows, rest, steps = (t.mT.contiguous() for t in (rows, rest, dt_))
    return _Decays(from_start, to_end * dt_, from_start[..., -1, :], rows, rest, steps, cut)


def _sums(steps: Tensor, ahead: bool = False) -> Tensor:
    """Sums over a chunk's tokens up to and with each, or from each to the end. (Z, K, L, G, H) in and out"""
    # A product with ones and not cumsum: that adds in no fixed order on CUDA, and --deterministic refuses it.
    if torch.compiler.is_compiling():  # which adds in a fixed order, in a kernel that is a part of another
        return steps.flip(2).cumsum(2).flip(2) if ahead else steps.cumsum(2)
    length = steps.shape[2]
    ones = steps.new_ones(length, length)
    return torch.einsum("ls,zksgh->zklgh", ones.triu() if ahead else ones.tril(), steps)


def _kernel(decay: _Decays) -> Tensor:
    """The decay from token s to token l of a chunk times the step size at s; zero where cut. (Z, K, G, H, L, L)"""
    # Masked before the exponential: above the diagonal the exponent is positive and may overflow.
    exponent = decay.rows.unsqueeze(-1) - decay.rows.unsqueeze(-2)
    exponent += decay.rest.unsqueeze(-1)
    exponent -= decay.rest.unsqueeze(-2)
    return exponent.masked_fill_(decay.cut, -torch.inf).exp_().mul_(decay.steps.unsqueeze(-2))


def _weights(kernel: Tensor, scores: Tensor, d: Tensor) -> Tensor:
    """What token l gets of x_s within a chunk, D x_l included, in the memory of ``kernel``. (Z, K, G, H, L, L)"""
    if torch.compiler.is_compiling():
        is_own = torch.eye(kernel.shape[-1], dtype=torch.bool, device=kernel.device)
        return torch.where(is_own, kernel * scores + d[..., None, None], kernel * scores)
    kernel *= scores
    kernel.diagonal(dim1=-2, dim2=-1).add_(d.unsqueeze(-1))
    return kernel


def _by_head(t: Tensor) -> Tensor:
    """(Z, K, G, L, H, P) as (Z, K, G, H, L, P); compiled it is copied once for the products that take it."""
    t = t.transpose(3, 4)
    return t.contiguous() if torch.compiler.is_compiling() else t


def _stacked(states: list[Tensor]) -> Tensor:
    """States (Z, G, N, H P) of chunks as (Z, K, G, N, H P)."""
    if len(states) == 1:
        return states[0].unsqueeze(1)
    # Flattened, as Inductor takes four dimensions for an image's, and lays them out as one, to copy them thereafter.
    return torch.stack([state.flatten(1, 2) for state in states], 1).unflatten(2, states[0].shape[1:3])


def _beside(read: Tensor, zeros: Tensor) -> Tensor:
    """``zeros``; compiled they seem to depend on what is read, so that the kernel that reads it writes them, too."""
    return torch.where(read.isnan(), zeros, 0.0) if torch.compiler.is_compiling() else zeros


def _by_group(t: Tensor) -> Tensor:
    """(Z, K, L, G, ...) as (Z, K, G, L, ...), and back."""
    return t.transpose(2, 3)


def _decayed(state: Tensor, decay: Tensor, added: Tensor) -> Tensor:
    """A state (Z, G, N, H P), each head times its decay (Z, G, H), and what is added."""
    state, added = (t.unflatten(-1, (decay.shape[-1], -1)) for t in (state, added.to(state.dtype)))
    return torch.addcmul(added, state, decay[:, :, None, :, None]).flatten(-2)
