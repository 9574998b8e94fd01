"""Which beginnings of documents a model is asked to go on with."""

import numpy as np
import pytest

from granite_scu.data.blocks.packing import best_fit, in_a_row
from granite_scu.data.tokens.stream import Stream
from granite_scu.evaluation.samples import openings


def stream(*lengths: int, learned_from: int = 1) -> Stream:
    """Documents of so many tokens, numbered through; each is learned from a place on."""
    tokens = np.arange(sum(lengths), dtype=np.int32)
    targets = np.concatenate([np.arange(length) >= learned_from for length in lengths])
    return Stream(tokens, np.cumsum(lengths) - 1, np.ones(len(tokens), np.uint16), targets)


def found(stream: Stream, count: int = 2, layout=in_a_row, block_size: int = 64, numbers: slice = slice(None)):
    blocks = layout(stream, stream.bounds, block_size, 0)
    blocks = blocks.select(range(len(blocks))[numbers])
    return [(tokens.tolist(), rest.tolist()) for tokens, rest in openings(blocks, count)]


def test_a_text_is_opened_by_its_first_tokens_and_not_by_what_ends_it():
    (one, two) = found(stream(100, 50, 100))
    assert one == (list(range(32)), list(range(32, 99)))
    assert two == (list(range(100, 132)), list(range(132, 149)))


def test_a_conversation_is_opened_by_all_before_the_first_answer():
    (only,) = found(stream(60, learned_from=11), layout=best_fit)
    assert only == (list(range(11)), list(range(11, 59)))


@pytest.mark.parametrize("short", [stream(39), stream(300, learned_from=257)])
def test_what_leaves_nothing_to_go_on_with_or_is_long_is_left_out(short):
    assert found(short, block_size=512) == []


def test_of_the_tail_of_one_text_a_stretch_stands_for_a_document():
    (first, *_) = found(stream(400), numbers=slice(3, None))
    assert first[0] == list(range(192, 224))


def test_there_may_be_fewer_than_are_wanted():
    assert len(found(stream(100, 20, 100), count=5)) == 2
