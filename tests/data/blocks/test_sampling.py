from collections import Counter
from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.data.blocks.sampling import EndlessBatches, indices

SHAPES = {
    "n_blocks": st.integers(1, 50),
    "batch_size": st.integers(1, 9),
    "world_size": st.integers(1, 4),
    "seed": st.integers(0, 2**32 - 1),
}


@given(**SHAPES)
def test_each_epoch_has_every_block_once_over_all_ranks_and_batches(n_blocks, batch_size, world_size, seed):
    epochs = 3
    n_batches = -(-epochs * n_blocks // (batch_size * world_size))
    places = ((k, rank) for k in range(n_batches) for rank in range(world_size))
    read = [index for k, rank in places for index in indices(k, n_blocks, batch_size, seed, rank, world_size)]
    for epoch in range(epochs):
        assert sorted(read[epoch * n_blocks : (epoch + 1) * n_blocks]) == list(range(n_blocks))


def test_starting_late_is_skipping_and_there_is_no_length():
    assert list(islice(EndlessBatches(lambda k: [k], start=2), 2)) == [[2], [3]]
    with pytest.raises(TypeError):
        len(EndlessBatches(lambda k: [k]))  # type: ignore[arg-type]


@given(**SHAPES, k=st.integers(0, 10**9))
def test_ranks_together_read_what_one_process_reads_in_a_larger_batch(n_blocks, batch_size, world_size, seed, k):
    alone = indices(k, n_blocks, world_size * batch_size, seed)
    together = [indices(k, n_blocks, batch_size, seed, rank, world_size) for rank in range(world_size)]
    assert list(chain.from_iterable(together)) == alone


def test_orders_differ_between_epochs_and_seeds():
    orders = [tuple(indices(epoch, 50, 50, seed)) for epoch in range(3) for seed in range(3)]
    assert len(set(orders)) == 9


def test_every_place_of_an_epoch_is_about_as_likely_for_a_block():
    first = Counter(indices(epoch, 4, 4, seed=0)[0] for epoch in range(400))
    assert all(70 < first[block] < 130 for block in range(4))
