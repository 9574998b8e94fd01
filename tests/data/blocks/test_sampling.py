from collections import Counter
from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.data.blocks.sampling import EndlessBatches, Epochs, Order

SHAPES = {
    "sizes": st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any),
    "batch_size": st.integers(1, 9),
    "world_size": st.integers(1, 4),
    "seed": st.integers(0, 2**32 - 1),
}


def order_of(sizes, seed) -> Order:
    """Of epochs that have so many blocks, in turn."""
    return Order(lambda epoch: sizes[epoch % len(sizes)], seed)


@given(**SHAPES)
def test_each_epoch_has_every_block_once_over_all_ranks_and_batches(sizes, batch_size, world_size, seed):
    order = order_of(sizes, seed)
    every = [(epoch, number) for epoch, size in enumerate(sizes) for number in range(size)]
    n_batches = -(-len(every) // (batch_size * world_size))
    batches = [order.batch(k, batch_size, rank, world_size) for k in range(n_batches) for rank in range(world_size)]
    assert sorted(chain.from_iterable(batches))[: len(every)] == every


def test_starting_late_is_skipping_and_there_is_no_length():
    assert list(islice(EndlessBatches(lambda k: [k], start=2), 2)) == [[2], [3]]
    with pytest.raises(TypeError):
        len(EndlessBatches(lambda k: [k]))  # type: ignore[arg-type]


@given(**SHAPES, k=st.integers(0, 1000))
def test_ranks_together_read_what_one_process_reads_in_a_larger_batch(sizes, batch_size, world_size, seed, k):
    alone = order_of(sizes, seed).batch(k, world_size * batch_size)
    together = [order_of(sizes, seed).batch(k, batch_size, rank, world_size) for rank in range(world_size)]
    assert list(chain.from_iterable(together)) == alone


def test_orders_differ_between_epochs_and_seeds():
    batches = [order_of([50], seed).batch(epoch, 50) for epoch in range(3) for seed in range(3)]
    assert len({tuple(number for _, number in batch) for batch in batches}) == 9


def test_every_place_of_an_epoch_is_about_as_likely_for_a_block():
    order = order_of([4], seed=0)
    first = Counter(order.batch(epoch, 4)[0][1] for epoch in range(400))
    assert all(70 < first[block] < 130 for block in range(4))


def test_the_mean_of_epochs_counts_the_part_of_the_last_one():
    sizes = [3, 1, 5]
    epochs = Epochs([None] * 3, lambda epoch: [None] * sizes[epoch])  # type: ignore[arg-type]
    assert epochs.mean(2.5) == (3 + 1 + 0.5 * 5) / 2.5
    assert epochs.mean(2.0) == 2.0 and epochs.mean(None) == 3
