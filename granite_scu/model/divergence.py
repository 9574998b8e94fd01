"""How far the adapted model has moved from the base model: their KL divergence, a chunk of tokens at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from granite_scu.model.documents import isolating
from granite_scu.model.loss import CHUNKED_TYPES, chunk_on, hidden_states


def summed_kl(
    model: nn.Module,
    input_ids: Tensor,
    without_adapter: Callable[[], AbstractContextManager[None]],
    documents: Tensor | None = None,
) -> Tensor:
    """Sum over positions of KL(adapted || base), in nats, an fp32 scalar.

    KL = sum_v p(v) (ln p(v) - ln q(v)), with p of the adapted model and q of the base model, taken over the whole
    vocabulary: no sampling, so no noise of its own.

    Args:
        model: a transformers causal language model whose layers are adapted, in evaluation mode, without gradients.
        input_ids: (batch, time) tokens.
        without_adapter: a context in which the same model is the base model (PEFT's ``disable_adapter``).
        documents: (batch, time) numbers of documents that do not see one another.
    """
    if model.config.model_type not in CHUNKED_TYPES:
        arguments = {"input_ids": input_ids, "use_cache": False, **isolating(model, documents)}
        adapted = model(**arguments).logits
        with without_adapter():
            base = model(**arguments).logits
        return _kl(adapted.flatten(0, 1), base.flatten(0, 1))
    head, scaling = model.get_output_embeddings().weight, getattr(model.config, "logits_scaling", 1.0)
    adapted = hidden_states(model, input_ids, documents).flatten(0, -2)
    with without_adapter():
        base = hidden_states(model, input_ids, documents).flatten(0, -2)
    chunk = chunk_on(adapted.device.type)
    parts = [
        _kl(F.linear(p, head) / scaling, F.linear(q, head) / scaling)
        for p, q in zip(adapted.split(chunk), base.split(chunk), strict=True)
    ]
    return torch.stack(parts).sum()


def _kl(adapted: Tensor, base: Tensor) -> Tensor:
    log_p, log_q = F.log_softmax(adapted.float(), -1), F.log_softmax(base.float(), -1)
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)
