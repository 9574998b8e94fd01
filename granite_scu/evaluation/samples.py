"""What base model and adapter make of the beginnings of a few documents, for a person to read."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.sampling import Sampling
from granite_scu.data.blocks.packing import Blocks
from granite_scu.evaluation.answers import beginning_in, continuations, ends_of, padding_for

_LENGTH, _MAX_LENGTH, _MIN_REST = 32, 256, 8
"""Tokens: of a text's opening; of the longest that is taken of a chat; and what has to follow it."""
_LOOKED_AT = 200
"""Blocks that are searched."""


Opening = tuple[NDArray[np.int32], NDArray[np.int32]]
"""The beginning of a document, of a text its first tokens and of a conversation all before the first that is learned;
and how the document continues."""


def openings(blocks: Blocks, count: int) -> list[Opening]:
    """The first ones among the blocks, ``count`` or as many as there are.

    Where no document begins in the blocks, as in the tail of one long book, stretches of it stand for documents.
    """
    some, stream = blocks.select(range(min(len(blocks), _LOOKED_AT))), blocks.stream
    starts = stream.bounds_of(beginning_in(some))[:, 0].tolist()
    starts = starts or [start for index in range(len(some)) for start in some.spans_of(index)[:, 0].tolist()]
    found: list[Opening] = []
    for start in starts:
        if len(found) == count:
            break
        stop = int(stream.ends[np.searchsorted(stream.ends, start)])
        learned = int(np.argmax(stream.targets[start:stop]))
        length = learned if learned > 1 else _LENGTH  # of a text all is learned but the first
        if length <= _MAX_LENGTH and start + length + _MIN_REST <= stop:
            found.append((stream.tokens[start : start + length], stream.tokens[start + length : stop]))
    return found


SAMPLING = Sampling(max_new_tokens=40, temperature=0.0)


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    openings: Sequence[Opening],
    without_adapter: Callable[[], AbstractContextManager],
) -> list[dict[str, str]]:
    """Continue each of the openings, with and without the adapter.

    Args:
        model: in evaluation mode, its adapter in place.
        tokenizer: the model's.
        openings: what to continue.
        without_adapter: the context in which the model is its base.

    Returns:
        ``prompt``, as the model was given it; ``document``, how the document itself continues; and what the ``base``
        model and the ``adapter`` make of it.
    """
    prompts, ends = [tokens.tolist() for tokens, _ in openings], ends_of(model, tokenizer, [])

    def continued() -> list[str]:
        found = continuations(model, prompts, SAMPLING.max_new_tokens, ends, padding_for(model, tokenizer))
        return tokenizer.batch_decode(found, skip_special_tokens=True)

    with without_adapter():
        base = continued()
    documents = [rest[: SAMPLING.max_new_tokens] for _, rest in openings]
    texts = tokenizer.batch_decode(prompts), tokenizer.batch_decode(documents, skip_special_tokens=True)
    names = "prompt", "document", "base", "adapter"
    return [dict(zip(names, each, strict=True)) for each in zip(*texts, base, continued(), strict=True)]
