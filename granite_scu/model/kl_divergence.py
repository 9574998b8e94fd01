"""How far the adapted model has moved from what it was: their KL divergence, a chunk of tokens at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from granite_scu.config.settings import IGNORED
from granite_scu.model.document_mask import isolating
from granite_scu.model.loss import CHUNKED_TYPES, chunk_on, hidden_states


def summed_kl(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    reference_mode: Callable[[], AbstractContextManager[None]],
    documents: Tensor | None = None,
) -> Tensor:
    """Sum over the counted positions of KL(adapted || reference), in nats, an fp32 scalar.

    KL = sum_v p(v) (ln p(v) - ln q(v)), with p of the adapted model and q of the reference, taken over the whole
    vocabulary: no sampling, so no noise of its own.

    Args:
        model: a transformers causal language model whose layers are adapted, in evaluation mode, without gradients.
        input_ids: (batch, time) tokens.
        labels: (batch, time) already shifted; ``IGNORED``, as in prompts and padding, is not counted.
        reference_mode: a context in which the same model is the reference; PEFT's ``disable_adapter`` makes it
            the base.
        documents: (batch, time) numbers of documents that do not see one another.
    """
    counted = labels != IGNORED
    if model.config.model_type not in CHUNKED_TYPES:
        arguments = {"input_ids": input_ids, "use_cache": False, **isolating(model, documents)}
        adapted = model(**arguments).logits
        with reference_mode():
            reference = model(**arguments).logits
        return summed_kl_of(adapted[counted], reference[counted])
    head, scaling = model.get_output_embeddings().weight, getattr(model.config, "logits_scaling", 1.0)
    adapted = hidden_states(model, input_ids, documents)[counted]
    with reference_mode():
        reference = hidden_states(model, input_ids, documents)[counted]
    chunk = chunk_on(adapted.device.type)
    parts = [
        summed_kl_of(F.linear(p, head) / scaling, F.linear(q, head) / scaling)
        for p, q in zip(adapted.split(chunk), reference.split(chunk), strict=True)
    ]
    return torch.stack(parts).sum()


def summed_kl_of(adapted: Tensor, reference: Tensor) -> Tensor:
    """Sum of KL(adapted || reference) in nats, from the logits of both, (tokens, vocabulary)."""
    log_p, log_q = F.log_softmax(adapted.float(), -1), F.log_softmax(reference.float(), -1)
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)
