"""Cross-entropy from hidden states, a chunk of tokens at a time.

The logits of a 100 000-word vocabulary are the largest tensor of a training step. Here those of a chunk exist at once.
Its share of the gradient is computed with them, as the loss is a plain sum, so that the logits are neither kept
for the backward pass nor computed twice (the idea is liger-kernel's, Hsu et al. 2024, arXiv 2410.10989).
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers.modeling_outputs import BaseModelOutput

from granite_scu.config.settings import IGNORED
from granite_scu.model.attention import isolating
from granite_scu.model.mamba2.tiling import kind_of, product, takes_onednn


def chunk_on(device: str) -> int:
    """Tokens whose logits exist at once: for Granite 4's vocabulary 50 MB in fp32 on a CPU, 0.8 GB elsewhere.

    A GPU is kept busy by large products only; on a CPU larger ones are no faster.
    """
    return 128 if device == "cpu" else 2048


MANY = 0.5
"""Share of a batch's positions that count from which on the others are not worth leaving out."""


def has_plain_head(model: nn.Module) -> bool:
    """Whether a model's logits are hidden @ head.T / logits_scaling, so that its hidden states do in their place."""
    head = model.get_output_embeddings() if applies_head(model) else None
    return type(head) is nn.Linear and head.bias is None  # one with an adapter or in 4 bits is of another type


def applies_head(model: nn.Module) -> bool:
    """Whether a model's logits are head(hidden) / logits_scaling, as they are not where it caps or multiplies them.

    Its own forward pass is tried, once, with known tensors in place of what the decoder and the head make: that takes a
    millisecond, and no weights.
    """
    if "_applies_head" not in vars(model):
        try:
            with torch.no_grad(), _disable_current_modes():  # fake tensors have no values to compare
                model._applies_head = _tried_head(model)
        except Exception:  # whatever the model's own code wants of its parts: then its logits are left to it
            model._applies_head = False
    return bool(model._applies_head)


def _tried_head(model: nn.Module) -> bool:
    decoder, head = model.base_model, model.get_output_embeddings()
    hidden = torch.linspace(-3, 3, 8, device="cpu").view(1, 1, 8)
    logits = torch.linspace(-100, 100, len(head.weight), device="cpu").view(1, 1, -1)  # beyond any cap
    stands_for_head = _Known(logits)
    copied = copy.copy(model)
    copied._modules = {
        name: _Known(_Hidden(hidden)) if part is decoder else stands_for_head if part is head else part
        for name, part in model._modules.items()
    }
    made = copied(input_ids=torch.zeros(1, 1, dtype=torch.long, device="cpu"), use_cache=False).logits
    given = [torch.equal(each, hidden) for each in stands_for_head.given]
    return given == [True] and torch.equal(made, logits / getattr(model.config, "logits_scaling", 1.0))


class _Known(nn.Module):
    """Gives the same whatever it is given, which it notes."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = self.weight = result  # some models read the dtype of a head's weight
        self.given: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given += args
        return self.result


class _Hidden(BaseModelOutput):
    """Hidden states of a decoder, and None for all else that it might give."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def summed_nats(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    documents: Tensor | None = None,
    chunk: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Sum of -ln p(label) over the counted positions of a batch, in nats, an fp32 scalar.

    Args:
        model: a transformers causal language model (not wrapped by PEFT; its layers may be).
        input_ids: (batch, time) tokens. Padding stands only at the end, where causality keeps it from mattering.
        labels: (batch, time) already shifted; ``IGNORED`` is not counted.
        documents: (batch, time) numbers of documents that do not see one another; None where all of a block is seen.
        chunk, compiled: as of ``summed_cross_entropy``.
    """
    if not has_plain_head(model):
        logits, targets = _logits(model, input_ids, labels, documents)
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    hidden = hidden_states(model, input_ids, documents)
    head = model.get_output_embeddings().weight
    return summed_cross_entropy(hidden, head, labels, getattr(model.config, "logits_scaling", 1.0), chunk, compiled)


def hidden_states(model: nn.Module, input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
    """(batch, time, hidden) last hidden states. Arguments as ``summed_nats``."""
    arguments = isolating(model, documents)
    return model.base_model(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state


def _worth_selecting(labels: Tensor) -> Tensor | None:
    """Of a batch's positions those that count, where the logits of the others are worth saving; None where not.

    In chats few count, and the products with a large vocabulary are a fifth of a small model's step. Elsewhere than on
    a CPU the selection would wait for the device; in the simulation of a step, labels have no values.
    """
    if labels.device.type != "cpu" or isinstance(labels, FakeTensor):
        return None
    counted = labels != IGNORED
    return counted if counted.sum() < MANY * counted.numel() else None


def _logits(model: nn.Module, input_ids: Tensor, labels: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """The model's own logits in fp32, (positions, vocabulary), and the labels there, (positions,)."""
    counted, hook = _worth_selecting(labels), None
    if counted is not None:
        labels, head = labels[counted], model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda head, inputs: (inputs[0][counted].unsqueeze(0),))
    try:
        logits = model(input_ids=input_ids, use_cache=False, **isolating(model, documents)).logits
    finally:
        if hook:
            hook.remove()
    return logits.float().flatten(0, 1), labels.flatten()


@torch.no_grad()
def token_nats(model: nn.Module, input_ids: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
    """-ln p(label) at each position, in nats, (batch, time) fp32; 0 where nothing is counted. As ``summed_nats``."""
    if not applies_head(model):
        logits, targets = _logits(model, input_ids, labels, documents)
        # Words last, where torch sums them in lanes: over another axis it adds them one by one to a sum that is soon
        # too large for the smallest, and 1e-4 nats a token are lost.
        nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        return _placed(nats, labels)
    hidden, targets = hidden_states(model, input_ids, documents).flatten(0, -2), labels.flatten()
    counted = _worth_selecting(targets)
    if counted is not None:
        hidden, targets = hidden[counted], targets[counted]
    # Called and not read for its weight: an adapter from elsewhere may sit on the head, too.
    head, scaling = model.get_output_embeddings(), getattr(model.config, "logits_scaling", 1.0)
    chunk = chunk_on(hidden.device.type)
    parts = [
        F.cross_entropy(head(h).float().div_(scaling), t, ignore_index=IGNORED, reduction="none")
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return _placed(torch.cat(parts), labels)


def _placed(nats: Tensor, labels: Tensor) -> Tensor:
    """What was found at all labels, or at those that count, in the shape of all of them."""
    if len(nats) == labels.numel():
        return nats.view(labels.shape)
    return nats.new_zeros(labels.shape).masked_scatter_(labels != IGNORED, nats)


def summed_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, scaling: float, chunk: int | None = None, compiled: bool = False
) -> Tensor:
    """Sum over tokens of -ln p(label), in nats, an fp32 scalar (fp64 for fp64).

    Args:
        hidden: (batch, time, hidden) last hidden states.
        head: (vocabulary, hidden) output embedding.
        labels: (batch, time) the token that each position predicts, already shifted; ``IGNORED`` is not counted.
        scaling: Granite's ``logits_scaling``, which divides the logits; 1 elsewhere.
        chunk: tokens at a time; None takes what suits the device.
        compiled: have torch.compile fuse what is done with a chunk's logits: on a GPU it moves a third of the bytes.
    """
    device = hidden.device.type
    chunk = chunk or chunk_on(device)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    counted = None if compiled else _worth_selecting(labels)
    hidden, labels = (
        (hidden.flatten(0, -2), labels.flatten()) if counted is None else (hidden[counted], labels[counted])
    )
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(hidden.to(dtype), head.to(dtype), labels, scaling, chunk, compiled)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, scaling: float, chunk: int, compiled: bool
    ) -> Tensor:
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        d_head = torch.zeros_like(head, dtype=wide) if wants_head else None
        nats = hidden.new_zeros((), dtype=wide)
        logits = hidden.new_empty(min(chunk, len(hidden)), len(head), dtype=wide)
        work, dtype = _compiled_work() if compiled else _work, hidden.dtype if wants_hidden or wants_head else None
        # Probabilities of single words are near the smallest number that fp16 has; bf16 reaches as far as fp32.
        unit = 256.0 if hidden.dtype == torch.float16 else 1.0
        ignored = (labels == IGNORED).unsqueeze(1)
        targets, counted = labels.unsqueeze(1).masked_fill(ignored, 0), ~ignored
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            z = logits_into(logits, hidden[part], head)
            found, narrow = work(z, targets[part], counted[part], scaling, unit, dtype)
            nats += found
            if d_hidden is not None:
                d_hidden[part] = product(narrow, head)
            if d_head is not None:
                d_head += narrow.mT @ hidden[part]
        ctx.unit = unit
        ctx.save_for_backward(d_hidden, d_head)
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_nats: Tensor) -> tuple[Tensor | None, ...]:
        scale = d_nats / ctx.unit
        # Both in fp32: CUDA would round the factor to the other's bf16, and 1/3 then is 0.2 % too large.
        d_hidden, d_head = (None if d is None else (d.to(scale.dtype) * scale).to(d.dtype) for d in ctx.saved_tensors)
        return d_hidden, d_head, None, None, None, None


def logits_into(buffer: Tensor, hidden: Tensor, head: Tensor) -> Tensor:
    """The logits of a chunk before they are divided, (tokens, vocabulary), in the memory of ``buffer``."""
    logits = buffer[: len(hidden)]
    if hidden.dtype == logits.dtype:
        return logits.copy_(product(hidden, head.mT)) if takes_onednn(hidden) else torch.mm(hidden, head.mT, out=logits)
    if kind_of(hidden.device) == "cuda":  # summed in fp32 there, and written so
        return torch.mm(hidden, head.mT, out_dtype=logits.dtype, out=logits)
    return logits.copy_(hidden @ head.mT)


def _work(
    z: Tensor, targets: Tensor, counted: Tensor, scaling: float, unit: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The nats of a chunk, and their gradient by the products: unit (softmax - onehot) / scaling where it counts.

    Args:
        z: (tokens, vocabulary) products; overwritten.
        targets: (tokens, 1) labels, 0 where none counts.
        counted: (tokens, 1) whether it does.
        scaling: divides the products.
        unit: of the gradient.
        dtype: of the gradient; None where it is not needed.
    """
    z.div_(scaling)
    z.sub_(z.amax(1, keepdim=True))
    target = z.gather(1, targets)
    total = z.exp_().sum(1, keepdim=True)  # in the logits' own memory, as all that follows
    nats = (total.log() - target).masked_fill_(~counted, 0).sum()
    if dtype is None:
        return nats, None
    z.mul_(counted * (unit / scaling) / total)
    z.scatter_add_(1, targets, counted * torch.full_like(target, -unit / scaling))
    return nats, z.to(dtype)


def _fused_work(
    z: Tensor, targets: Tensor, counted: Tensor, scaling: float, unit: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """As ``_work``, in the form that a compiler fuses: nothing is written but the gradient."""
    z = z / scaling
    most = z.amax(1, keepdim=True)
    total = (z - most).exp().sum(1, keepdim=True)
    nats = ((total.log() + most - z.gather(1, targets)) * counted).sum()
    if dtype is None:
        return nats, None
    is_target = torch.arange(z.shape[1], device=z.device) == targets
    return nats, (((z - most).exp() / total - is_target.to(z.dtype)) * (counted * (unit / scaling))).to(dtype)


@functools.cache
def _compiled_work() -> Callable[..., tuple[Tensor, Tensor | None]]:
    return torch.compile(_fused_work)
