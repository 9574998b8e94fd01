"""The order of training blocks where one text follows another."""

from granite_scu.experiments.comparison.data import shifted


def test_the_second_text_takes_over_at_the_shift():
    whole = [shifted(k, (6, 4), batch_size=2, seed=1, shift=5) for k in range(14)]
    assert all(index < 6 for batch in whole[:5] for index in batch)
    assert all(6 <= index < 10 for batch in whole[5:] for index in batch)
