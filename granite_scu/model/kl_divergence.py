"""How far the adapted model has moved from what it was: their KL divergence, a chunk of tokens at a time."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from granite_scu.model.loss import chunk_on, hidden_states, logits_into, summed_cross_entropy

BUFFERS = 4
"""Of a chunk's logits, where the loss has one: of both models, one's probabilities, and what a logsumexp takes."""


def summed_kl_of(adapted: Tensor, reference: Tensor) -> Tensor:
    """Sum of KL(adapted || reference) in nats, from the logits of both, (tokens, vocabulary)."""
    wide = torch.promote_types(adapted.dtype, torch.float32)
    log_p, log_q = F.log_softmax(adapted.to(wide), -1), F.log_softmax(reference.to(wide), -1)
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)


def states(model: nn.Module, input_ids: Tensor, positions: Tensor, plain: bool) -> Tensor:
    """What predicts the next token at some positions: (positions, hidden), or logits where the head is not plain.

    Args:
        model: a transformers causal language model.
        input_ids: (batch, time) tokens; padding stands at the end of a row.
        positions: (positions,) indices into the flattened batch.
        plain: as ``loss.has_plain_head`` says.
    """
    all_of = hidden_states(model, input_ids) if plain else model(input_ids=input_ids, use_cache=False).logits
    return all_of.flatten(0, 1).index_select(0, positions)


def drift_of(model: nn.Module, base: Tensor, now: Tensor, plain: bool, chunk: int | None = None) -> Tensor:
    """Sum over positions of KL(base || now), in nats, with its gradient by ``now``; an fp64 scalar.

    Args:
        model: whose head both have.
        base, now: ``states`` of the same positions.
        plain: as they were made.
        chunk: positions whose logits exist at once; None takes what suits the device.
    """
    if not plain:
        return summed_kl_of(base, now).double()
    device = now.device.type
    head, scaling = model.get_output_embeddings().weight, getattr(model.config, "logits_scaling", 1.0)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else now.dtype
    with torch.autocast(device, enabled=False):
        chunk = chunk or (chunk_on(device) if device == "cpu" else chunk_on(device) // BUFFERS)
        args = (now.to(dtype), base.to(dtype), head.detach().to(dtype), scaling, chunk)
        return _ChunkedDrift.apply(*args)


def nats_of(model: nn.Module, states: Tensor, targets: Tensor, plain: bool) -> Tensor:
    """Sum over positions of -ln p(target), in nats, an fp64 scalar; no gradient.

    Args:
        model: whose head the states have.
        states: of the positions, as ``states`` makes them.
        targets: (positions,) tokens.
        plain: as they were made.
    """
    if not plain:
        return F.cross_entropy(states.float(), targets, reduction="sum").double()
    head, scaling = model.get_output_embeddings().weight.detach(), getattr(model.config, "logits_scaling", 1.0)
    return summed_cross_entropy(states, head, targets, scaling).double()


class _ChunkedDrift(torch.autograd.Function):
    """As the loss's: the gradient by the logits, softmax(now) - softmax(base), is made with them."""

    @staticmethod
    def forward(ctx: Any, now: Tensor, base: Tensor, head: Tensor, scaling: float, chunk: int) -> Tensor:
        d_now = torch.empty_like(now) if ctx.needs_input_grad[0] else None
        wide = torch.promote_types(now.dtype, torch.float32)
        buffers = [now.new_empty(min(chunk, len(now)), len(head), dtype=wide) for _ in range(2)]
        # Differences of probabilities are near the smallest number that fp16 has; bf16 reaches as far as fp32.
        unit = 256.0 if now.dtype == torch.float16 else 1.0
        nats = now.new_zeros((), dtype=torch.float64)
        for start in range(0, len(now), chunk):
            part = slice(start, start + chunk)
            logs = [logits_into(b, h[part], head).div_(scaling) for b, h in zip(buffers, (now, base), strict=True)]
            log_q, log_p = (log.sub_(log.logsumexp(1, keepdim=True)) for log in logs)
            p = log_p.exp()
            nats += log_p.sub_(log_q).mul_(p).sum(1).double().sum()
            if d_now is not None:
                torch.mm(log_q.exp_().sub_(p).mul_(unit / scaling).to(now.dtype), head, out=d_now[part])
        ctx.unit = unit
        ctx.save_for_backward(d_now)
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_nats: Tensor) -> tuple[Tensor | None, ...]:
        (d_now,) = ctx.saved_tensors
        wide = torch.promote_types(d_now.dtype, torch.float32)  # as of the loss: no factor is rounded to bf16
        return (d_now.to(wide) * (d_nats / ctx.unit).to(wide)).to(d_now.dtype), None, None, None, None
