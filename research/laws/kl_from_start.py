"""KL(adapted || the model as training began) on the newest micro-batch."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from granite_scu.config.settings import IGNORED
from granite_scu.model.attention import isolating
from granite_scu.model.compilation import evaluation_mode
from granite_scu.model.kl_divergence import summed_kl_of
from granite_scu.model.loss import chunk_on, has_plain_head, hidden_states
from granite_scu.training.module import GraniteModule, supervised
from research.laws.readings import per_token


class KLFromStart(L.Callback):
    """Reads it at each tick, in bits per supervised token: two forward passes of a micro-batch, no second model.

    The reference is the same model with its adapters switched off, or where training started from an adapter, with
    that.
    """

    def __init__(self) -> None:
        self._newest: dict[str, Tensor] | None = None

    def on_train_batch_end(self, trainer: L.Trainer, module: GraniteModule, outputs: Any, batch: Any, *_: Any) -> None:
        self._newest = batch

    def read(self, module: GraniteModule) -> dict[str, float]:
        """``kl_bpt``; NaN where no token is supervised."""
        if self._newest is None:  # a run continues from its last step, so that none has passed by here
            data = module.trainer.datamodule.served()
            data.start_batch = module.micro_batches - 1
            self._newest = module.trainer.strategy.batch_to_device(next(iter(data.train_dataloader())))
        ids, labels, documents = (self._newest.get(name) for name in ("input_ids", "labels", "documents"))
        with torch.no_grad(), module.precision(), evaluation_mode(module.model):
            nats = summed_kl(module.language_model, ids, labels, module.as_it_began, documents)
        return {"kl_bpt": per_token(module, nats, supervised(self._newest))}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """It has none."""


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
    if not has_plain_head(model):
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
