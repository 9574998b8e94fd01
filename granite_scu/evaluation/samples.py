"""What base model and adapter make of the beginnings of a few documents, for a person to read."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.sampling import Sampling
from granite_scu.data.blocks.packing import Blocks
from granite_scu.evaluation.answers import continuations, ends_of, padding_for

_LENGTH, _MAX_LENGTH, _MIN_REST = 32, 256, 8
"""Tokens: of a text's opening; of the longest that is taken of a chat; and what has to follow it."""
_LOOKED_AT = 200
"""Blocks that are searched."""


@dataclass(frozen=True, eq=False)
class Opening:
    """The beginning of a document.

    Attributes:
        tokens: (time,) int32: of a text its first ones, of a conversation all before the first that is learned.
        rest: (time,) int32, how the document continues.
    """

    tokens: NDArray[np.int32]
    rest: NDArray[np.int32]


def openings(blocks: Blocks, count: int) -> list[Opening]:
    """The first ones among the blocks, ``count`` or as many as there are.

    Where no document begins in the blocks, as in the tail of one long book, stretches of it stand for documents.
    """
    if not len(blocks):
        return []
    spans = np.concatenate([blocks.spans_of(index) for index in range(min(len(blocks), _LOOKED_AT))])
    ends = blocks.stream.ends
    owners = np.searchsorted(ends, spans[:, 0])
    begins = np.where(owners > 0, ends[owners - 1] + 1, 0) == spans[:, 0]
    starts = spans[begins, 0] if begins.any() else spans[:, 0]
    found: list[Opening] = []
    for start in starts.tolist():
        if len(found) == count:
            break
        stop = int(ends[np.searchsorted(ends, start)])
        learned = int(np.argmax(blocks.stream.targets[start:stop]))
        length = learned if learned > 1 else _LENGTH  # of a text all is learned but the first
        if length <= _MAX_LENGTH and start + length + _MIN_REST <= stop:
            found.append(Opening(*np.split(blocks.stream.tokens[start:stop], [length])))
    return found


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

    if not openings:
        return []
    prompts, ends = [opening.tokens.tolist() for opening in openings], ends_of(model, tokenizer, [])

    def continued() -> list[str]:
        found = continuations(model, prompts, SAMPLING.max_new_tokens, ends, padding_for(model, tokenizer))
        return tokenizer.batch_decode(found, skip_special_tokens=True)

    with without_adapter():
        base = continued()
    documents = [opening.rest[: SAMPLING.max_new_tokens] for opening in openings]
    texts = tokenizer.batch_decode(prompts), tokenizer.batch_decode(documents, skip_special_tokens=True)
    return [Sample(*each) for each in zip(*texts, base, continued(), strict=True)]
