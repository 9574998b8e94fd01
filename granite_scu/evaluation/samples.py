"""What base model and adapter make of the beginnings of a few documents, for a person to read."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.data.blocks.openings import Opening
from granite_scu.evaluation.generate import Sampling, stream

SAMPLING = Sampling(max_new_tokens=40, temperature=0.0)


@dataclass(frozen=True)
class Sample:
    """Texts.

    Attributes:
        prompt: the beginning of a document, as the model was given it.
        document: how the document itself continues.
        base: what the base model makes of it.
        adapter: what the adapted model makes of it.
    """

    prompt: str
    document: str
    base: str
    adapter: str


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    openings: Sequence[Opening],
    without_adapter: Callable[[], AbstractContextManager],
) -> list[Sample]:
    """Continue each of the openings, with and without the adapter.

    Args:
        model: in evaluation mode, its adapter in place.
        tokenizer: the model's.
        openings: what to continue.
        without_adapter: the context in which the model is its base.
    """

    def continued(opening: Opening) -> str:
        ids = torch.from_numpy(opening.tokens.astype(np.int64)).unsqueeze(0)
        pieces: list[str] = []
        stream(model, tokenizer, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, SAMPLING, pieces.append)
        return "".join(pieces)

    found = []
    for opening in openings:
        with without_adapter():
            base = continued(opening)
        rest = opening.rest[: SAMPLING.max_new_tokens]
        document = tokenizer.decode(rest, skip_special_tokens=True)
        found.append(Sample(tokenizer.decode(opening.tokens), document, base, continued(opening)))
    return found
