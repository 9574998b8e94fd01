"""Scores against a plain loop in float64."""

import math
from contextlib import contextmanager

import pytest
import torch
from rounding import OF_SMALL, rounding

from granite_scu.config.settings import IGNORED
from granite_scu.evaluation.score import score


@pytest.fixture
def module(make_module):
    return make_module()


@pytest.fixture
def blocks(make_batches):
    """Rows of one token sequence each, with ever fewer tokens that count."""
    batches = make_batches(5)
    return {name: torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels")}


def in_batches(blocks, size: int, padding: int = 0):
    """The blocks in batches, each with so many positions of padding at its end."""
    fill = {"input_ids": 1, "labels": IGNORED}
    padded = {n: torch.nn.functional.pad(block, (0, padding), value=fill[n]) for n, block in blocks.items()}
    count = len(blocks["labels"])
    return [{name: block[i : i + size] for name, block in padded.items()} for i in range(0, count, size)]


def plain_score(module, blocks) -> tuple[float, int]:
    """Token after token in float64, from the model's own logits."""
    nats, tokens = 0.0, 0
    for inputs, labels in zip(blocks["input_ids"], blocks["labels"], strict=True):
        with torch.no_grad():
            logits = module.language_model(input_ids=inputs[None], use_cache=False).logits[0].double()
        for distribution, label in zip(logits.log_softmax(-1), labels.tolist(), strict=True):
            if label != IGNORED:
                nats -= distribution[label].item()
                tokens += 1
    return nats, tokens


def test_it_is_the_plain_loops(module, blocks):
    found = score(module, in_batches(blocks, 3), model=module)
    nats, tokens = plain_score(module, blocks)
    assert found.tokens == tokens
    assert found.nats == pytest.approx(nats, rel=rounding(OF_SMALL))
    assert found.bits_per_token == pytest.approx(nats / tokens / math.log(2), rel=rounding(OF_SMALL))


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("padding", [0, 9])
def test_it_depends_on_neither_the_batch_size_nor_the_padding(module, blocks, size, padding):
    reference = score(module, in_batches(blocks, 2), model=module)
    found = score(module, in_batches(blocks, size, padding), model=module)
    assert found.tokens == reference.tokens
    assert found.nats == pytest.approx(reference.nats, rel=rounding(OF_SMALL))


@pytest.mark.parametrize("training", [True, False])
def test_it_scores_in_evaluation_mode_and_leaves_the_mode_as_it_was(make_module, blocks, training):
    module = make_module(lora={"dropout": 0.5})
    for update in module.updates.values():
        torch.nn.init.normal_(update.b)
    module.train(training)
    first, second = (score(module, in_batches(blocks, 5), model=module) for _ in range(2))
    assert first == second  # no dropout
    assert all(part.training is training for part in module.modules())


def test_it_builds_no_graph_and_leaves_no_gradient(module, blocks):
    score(module, in_batches(blocks, 5), model=module)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_sums_are_reduced_before_the_division(module, blocks):
    """As over two ranks that hold the same blocks."""
    one = score(module, in_batches(blocks, 5), model=module)
    two = score(module, in_batches(blocks, 5), model=module, reduce=lambda sums: 2 * sums)
    assert (two.nats, two.tokens) == (2 * one.nats, 2 * one.tokens)
    assert two.bits_per_token == one.bits_per_token


def test_every_batch_is_scored_under_the_context(module, blocks):
    events = []

    @contextmanager
    def context():
        events.append("in")
        yield
        events.append("out")

    def nats_of(input_ids, labels):
        events.append("batch")
        return module(input_ids, labels)

    score(nats_of, in_batches(blocks, 5), model=module, context=context())
    assert events == ["in", "batch", "batch", "out"]
