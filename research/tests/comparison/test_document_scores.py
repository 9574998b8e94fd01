"""Scores of each document against a plain loop in float64."""

import numpy as np
import pytest
import torch
from rounding import OF_SMALL, rounding

from granite_scu.config.settings import IGNORED
from granite_scu.data.blocks.packing import in_a_row
from granite_scu.data.tokens.stream import Stream
from granite_scu.model.loss import token_nats
from research.comparison.document_scores import score_documents


@pytest.fixture
def documents():
    """Blocks of eight tokens over documents of uneven lengths: within a block, across blocks, and at a block's edge."""
    lengths = [3, 20, 1, 5, 2, 30]
    tokens = np.random.default_rng(0).integers(0, 60, sum(lengths)).astype(np.int32)
    ends = np.cumsum(lengths) - 1
    targets = np.ones(len(tokens), bool)
    targets[[0, *(ends[:-1] + 1)]] = False
    stream = Stream(tokens, ends, np.zeros(len(tokens), np.uint16), targets)
    return in_a_row(stream, stream.bounds, 8, padding=0)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_document_scores_are_the_plain_loops(make_module, documents, size):
    module = make_module()
    nats_of = lambda input_ids, labels: token_nats(module.language_model, input_ids, labels)  # noqa: E731
    found = score_documents(nats_of, documents, size, model=module)
    nats, tokens = [0.0] * 6, [0] * 6
    for number, (inputs, labels, _) in enumerate(documents[i] for i in range(len(documents))):
        with torch.no_grad():
            ids = torch.from_numpy(inputs).long()[None]
            logits = module.language_model(input_ids=ids, use_cache=False).logits[0].double()
        for place, label in enumerate(labels):
            if label != IGNORED:
                position = number * 8 + place
                document = next(d for d, end in enumerate(documents.stream.ends) if position <= end)
                nats[document] -= logits[place].log_softmax(-1)[label].item()
                tokens[document] += 1
    assert found.tokens.tolist() == tokens == [2, 19, 0, 4, 1, 29]
    assert found.nats == pytest.approx(nats, rel=rounding(OF_SMALL))
