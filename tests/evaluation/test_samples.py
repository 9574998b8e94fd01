"""What both models make of a document's beginning: what ``generate`` says of the same prompt."""

import contextlib

import numpy as np
import pytest
import torch

from granite_scu.config.settings import TINY_MODEL, BaseConfig, LoraConfig
from granite_scu.evaluation import generate as generation
from granite_scu.evaluation.samples import SAMPLING, Opening, sample
from granite_scu.model import adapters, loading


@pytest.fixture(scope="module")
def model():
    """The embedded model with an adapter that changes what it says."""
    torch.manual_seed(0)
    model = adapters.attach(loading.load_model(BaseConfig(TINY_MODEL), torch.float32), LoraConfig(rank=2))
    for update in adapters.low_rank_updates(model).values():
        torch.nn.init.normal_(update.b, std=0.2)
    return model.eval()


def test_each_model_says_what_it_says_when_asked_by_generate(model):
    tokenizer = loading.load_tokenizer(TINY_MODEL)
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


def test_without_a_document_nothing_is_asked(model):
    assert sample(model, loading.load_tokenizer(TINY_MODEL), [], contextlib.nullcontext) == []
