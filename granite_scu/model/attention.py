"""What a token sees: documents that share a block are apart, in attention, in convolutions and in the scan's state.

And attention on a CPU: a chunk of queries at a time, over the keys that it sees and no others. PyTorch's own kernel
takes a product for each head and looks at every pair of positions below the diagonal, of documents that do not see one
another too; its backward pass in bf16 is slower than in fp32. Here the heads that share keys are rows of one matrix.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from granite_scu.model.compilation import evaluation_mode
from granite_scu.model.mamba2.conv import runs_of
from granite_scu.model.mamba2.mamba import HYBRID
from granite_scu.model.mamba2.tiling import kind_of

WAYS: tuple[tuple[str, ...], ...] = ((), ("seq_idx",), ("attention_mask",), ("seq_idx", "attention_mask"))
"""What a model of another type than Granite's hybrid may need besides positions, in the order in which it is tried."""


def isolating(model: nn.Module, documents: Tensor | None) -> dict[str, Tensor | dict[str, Tensor | None]]:
    """Arguments of the model's forward pass under which each document is computed as if it stood alone.

    Attention layers get positions that begin at zero in each document, from which transformers makes the mask, and
    Mamba-2 layers the documents' numbers (``mamba.mix``); transformers' own Mamba code would refuse them without
    compiled kernels. Granite's hybrid passes positions on to no mask, so that the mask itself is given there, and so it
    is where ``choose_isolation`` found that it is needed. Where that found no way, there are no arguments.

    Args:
        model: a transformers causal language model (not wrapped by PEFT).
        documents: (batch, time) numbers of documents, each document in one run; None where blocks are seen as wholes.
    """
    way = getattr(model, "_isolated_by", ())
    if documents is None or way is None:
        return {}
    runs = runs_of(documents)
    if model.config.model_type != HYBRID:
        return _arguments(model, runs, way)
    masks = {"full_attention": _mask(runs, model), "linear_attention": None}
    return {"position_ids": _positions(runs), "attention_mask": masks, "seq_idx": runs}


def can_isolate(model: nn.Module) -> bool:
    """Whether ``isolating`` keeps the documents of a model apart. One that was not tried needs positions alone."""
    return getattr(model, "_isolated_by", ()) is not None


@torch.no_grad()
def choose_isolation(model: nn.Module) -> None:
    """Try what ``isolating`` has to give a model, so that what it makes of a document does not depend on another.

    Positions alone do not keep documents apart in models whose mask heeds none, as OPT's, and nothing does where layers
    with a state of their own know of no documents.
    """
    device, rows = next(model.parameters()).device, len(model.get_input_embeddings().weight)
    runs = runs_of(torch.tensor([[0, 0, 0, 1, 1, 1]], device=device))
    ids = torch.tensor([[[1, 2, 3, 7, 8, 9]], [[4, 5, 6, 7, 8, 9]]], device=device) % rows
    for way in WAYS:
        try:
            with evaluation_mode(model):
                arguments = _arguments(model, runs, way)
                one, other = (model(input_ids=each, use_cache=False, **arguments).logits[0, 3:] for each in ids)
        except Exception:  # whatever the model's own code makes of arguments that it does not know
            continue
        if float((one - other).abs().max()) <= NEAR * float(one.abs().max()):
            model._isolated_by = way
            return
    model._isolated_by = None


NEAR = 0.02
"""Of the largest logit: some roundings in bf16."""


def _arguments(model: nn.Module, runs: Tensor, way: tuple[str, ...]) -> dict[str, Any]:
    given: dict[str, Any] = {"position_ids": _positions(runs)}
    if "seq_idx" in way:
        given["seq_idx"] = runs
    if "attention_mask" in way:
        windows = {"full_attention": None, "sliding_attention": getattr(model.config, "sliding_window", None)}
        kinds = set(getattr(model.config, "layer_types", None) or ())
        by_kind = {kind: _mask(runs, model, windows[kind]) for kind in kinds}
        given["attention_mask"] = by_kind or _mask(runs, model)
    return given


def _positions(runs: Tensor) -> Tensor:
    time = torch.arange(runs.shape[1], device=runs.device).expand_as(runs)
    begins = torch.nn.functional.pad(runs[:, 1:] != runs[:, :-1], (1, 0), value=True)
    return time - torch.where(begins, time, 0).cummax(1).values


def _mask(runs: Tensor, model: nn.Module, window: int | None = None) -> Tensor:
    """(batch, 1, time, time): what each token sees, as booleans or as what is added to scores.

    Eager attention adds. So do SDPA's kernels on a GPU, which would make a tensor of the booleans in every layer and
    keep it for the backward pass; one made here serves them all.
    """
    seen: Any = (runs.unsqueeze(2) == runs.unsqueeze(1)).tril().unsqueeze(1)
    if window:
        seen = seen.triu(1 - window)
    if model.config._attn_implementation != "eager" and kind_of(runs.device) == "cpu":
        return seen
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


CPU_ATTENTION = "granite_scu_cpu"
"""By which transformers knows it."""

CHUNK = 64
"""Queries of a head at a time; more see more keys that are masked, fewer make small products."""

KEPT = 2
"""Probabilities are kept for the backward pass where a query sees no more keys, on average, than this many times its
own size, and computed again where it sees more."""


class Part(NamedTuple):
    """A chunk of queries.

    Attributes:
        queries: their places.
        keys: the places of what any of them sees, in one run.
        hidden: what is added to the scores of the last of these keys, (batch or 1, 1, queries, some keys): 0, or the
            least number where a key is not seen.
    """

    queries: slice
    keys: slice
    hidden: Tensor


_parts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by mask: all layers have the same one


def parts_of(length: int, mask: Tensor | None) -> list[Part]:
    """The chunks of a text.

    Args:
        length: of the text.
        mask: (batch, 1, length, length) booleans, what each position sees; None where it is what came before.
    """
    chunks = [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
    if mask is None:
        return [Part(chunk, slice(0, chunk.stop), _diagonal(chunk.stop - chunk.start)) for chunk in chunks]
    if mask not in _parts:
        _parts[mask] = [_part(mask, chunk) for chunk in chunks]
    return _parts[mask]


def _part(mask: Tensor, chunk: slice) -> Part:
    seen = mask[:, :, chunk]
    columns = seen.flatten(0, 2).any(0).nonzero()
    keys = slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, mask.shape[-1])
    return Part(chunk, keys, _hidden(seen[..., keys]))


@functools.cache
def _diagonal(length: int) -> Tensor:
    return _hidden(torch.ones(1, 1, length, length, dtype=torch.bool).tril())


def _hidden(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; transformers' own where this is not made for what is asked.

    Args:
        module: the attention layer.
        query: (batch, heads, time, size).
        key: (batch, groups, time, size); each group of heads shares one.
        value: (batch, groups, time, size of a value).
        attention_mask: (batch, 1, time, time) booleans, what is seen; None where it is all that came before.
        dropout: of probabilities.
        scaling: of scores; None is 1 / sqrt(size).
        is_causal: whether positions see what came before them alone, where there is no mask.

    Returns:
        (batch, time, heads, size of a value), and no probabilities.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    whole_text = query.shape[2] == key.shape[2] > 1
    masked = attention_mask is not None
    fits = attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1 if masked else causal
    special = dropout or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    unreal = isinstance(query, FakeTensor) or torch.compiler.is_compiling()
    if query.device.type != "cpu" or special or unreal or not (whole_text and fits):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _Attention.apply(query, key, value, parts_of(query.shape[2], attention_mask), scale), None


class _Attention(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: list[Part], scale: float) -> Tensor:
        batch, heads, length, size = query.shape
        k, v = (tensor.flatten(0, 1) for tensor in (key, value))  # (batch groups, time, size)
        found = query.new_empty(batch, length, heads, v.shape[-1])
        seen = sum((part.queries.stop - part.queries.start) * (part.keys.stop - part.keys.start) for part in parts)
        kept = [] if seen <= KEPT * size * length and any(ctx.needs_input_grad) else None
        for part in parts:
            q = _rows(query[:, :, part.queries], len(k))
            p = _probabilities(q, k[:, part.keys], part, batch, scale).to(q.dtype)
            if kept is not None:
                kept.append(p)
            found[:, part.queries] = (p @ v[:, part.keys]).view(batch, heads, -1, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, k, v, *(kept or ()))
        ctx.parts, ctx.scale = parts, scale
        return found

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, d_found: Tensor) -> tuple[Tensor | None, ...]:
        query, k, v, *kept = ctx.saved_tensors
        batch, heads, length, size = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        d_query = query.new_empty(batch, length, heads, size).transpose(1, 2)
        d_k, d_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for number, part in enumerate(ctx.parts):
            q, d = _rows(query[:, :, part.queries], len(k)), _rows(d_found.transpose(1, 2)[:, :, part.queries], len(k))
            keys, values = k[:, part.keys], v[:, part.keys]
            p = kept[number].to(wide) if kept else _probabilities(q, keys, part, batch, ctx.scale)
            d_v[:, part.keys] += p.to(q.dtype).mT @ d
            # p (dp - sum(p dp)), in one pass
            d_scores = torch._softmax_backward_data((d @ values.mT).to(wide), p, -1, wide).mul_(ctx.scale).to(q.dtype)
            d_query[:, :, part.queries] = (d_scores @ keys).view(batch, heads, -1, size)
            d_k[:, part.keys] += d_scores.mT @ q
        d_key, d_value = (d.to(query.dtype).unflatten(0, (batch, -1)) for d in (d_k, d_v))
        return d_query, d_key, d_value, None, None


def _rows(chunk: Tensor, groups: int) -> Tensor:
    """(batch groups, heads of a group times queries, size) of (batch, heads, queries, size)."""
    return chunk.reshape(groups, -1, chunk.shape[-1])


def _probabilities(q: Tensor, k: Tensor, part: Part, batch: int, scale: float) -> Tensor:
    """(batch groups, rows, keys), from scores in fp32 at the least: bf16 would round a score of 30 by a tenth."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).mT).mul_(scale)
    of_heads = scores.view(batch, -1, part.hidden.shape[-2], scores.shape[-1])
    of_heads[..., -part.hidden.shape[-1] :].add_(part.hidden)
    return F.softmax(scores, -1)


AttentionInterface.register(CPU_ATTENTION, attend)
AttentionMaskInterface.register(CPU_ATTENTION, sdpa_mask)
