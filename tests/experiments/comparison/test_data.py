"""The order of training blocks where one text follows another."""

from itertools import islice

import pytest

from granite_scu.experiments.comparison.data import shifting_batches


@pytest.mark.parametrize("start", [0, 3, 5, 9])
def test_a_later_start_goes_on_where_an_earlier_one_would_be_across_the_shift(start):
    whole = list(islice(shifting_batches((6, 4), batch_size=2, seed=1, shift=5), 14))
    later = list(islice(shifting_batches((6, 4), batch_size=2, seed=1, shift=5, start=start), 14 - start))
    assert later == whole[start:]


def test_the_second_text_takes_over_at_the_shift():
    whole = list(islice(shifting_batches((6, 4), batch_size=2, seed=1, shift=5), 14))
    assert all(index < 6 for batch in whole[:5] for index in batch)
    assert all(6 <= index < 10 for batch in whole[5:] for index in batch)
