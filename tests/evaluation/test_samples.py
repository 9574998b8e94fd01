"""What both models make of a document's beginning: what ``generate`` says of the same prompt."""

import contextlib

import numpy as np

from granite_scu.evaluation import generate as generation
from granite_scu.evaluation.samples import SAMPLING, Opening, sample


def test_each_model_says_what_it_says_when_asked_by_generate(model, tokenizer):
    text, rest = "def read(path):\n    ", '"""Read a file."""'
    tokens, following = (np.array(tokenizer(words)["input_ids"], np.int32) for words in (text, rest))
    (found,) = sample(model.get_base_model(), tokenizer, [Opening(tokens, following)], model.disable_adapter)

    def asked() -> str:
        pieces: list[str] = []
        inputs = generation.tokenized(tokenizer, text, chat=False)
        generation.stream(model.get_base_model(), tokenizer, inputs, SAMPLING, pieces.append)
        return "".join(pieces)

    with model.disable_adapter():
        assert found.base == asked()
    assert found.adapter == asked() != found.base
    assert (found.prompt, found.document) == (text, rest)


def test_without_a_document_nothing_is_asked(model, tokenizer):
    assert sample(model, tokenizer, [], contextlib.nullcontext) == []
