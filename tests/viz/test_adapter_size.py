"""What size two texts would have an adapter: the sentence, and how much of its course is drawn."""

import pytest

from granite_scu.viz.adapter_size import FIELDS, describe, limits

UNKNOWN = "held-out text does not tell what size the adapter should have"


def record(*factors: float | None) -> dict:
    return dict(zip(FIELDS, factors, strict=True))


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((1.08, 0.03, 1.6), "held-out text would have the adapter 8 % larger (± 3 %), the training text 60 % larger"),
        ((0.9237, 0.0012, 1.153), "held-out text would have the adapter 7.6 % smaller (± 0.1 %), the training text "
                                  "15 % larger"),
        ((1.02, 0.03, 1.6), "held-out text finds the adapter about the right size (± 3 %), the training text would "
                            "have it 60 % larger"),
        ((1.3, 0.6, 1.6), "held-out text does not tell whether the adapter should be larger or smaller, the "
                          "training text would have it 60 % larger"),
        ((4.2, 1.13, 12.4), "held-out text would have the adapter 4.2 times as large (± 1.1), the training text 12 "
                            "times as large"),
        ((12_345.0, 1500.0, 4.0), "held-out text would have the adapter 12,000 times as large (± 1,500), the training "
                                  "text 4 times as large"),
        ((0.0, None, 1.6), "held-out text would have the adapter removed, the training text 60 % larger"),
        ((1.08, None, None), "held-out text would have the adapter 8 % larger"),
        ((1.08, 0.03, None), "held-out text would have the adapter 8 % larger (± 3 %)"),
        ((None, None, 1.6), f"{UNKNOWN}, the training text would have it 60 % larger"),
        ((None, None, None), UNKNOWN),
    ],
)  # fmt: skip
def test_the_sentence(factors, words):
    assert describe(record(*factors)) == words


def test_of_other_laws_there_is_none():
    assert describe({"step": 10, "s": 0.02}) is None


def test_the_start_and_a_wide_error_may_leave_the_picture():
    late = [record(0.9, 0.01, 1.1)] * 9
    assert limits([record(40.0, 90.0, 70.0), *late]) == limits(late)
    low, high = limits(late)
    assert -0.15 < low < -0.11 and 0.10 < high < 0.15
    assert limits([*late[1:], record(0.9, 5.0, 1.1)]) == pytest.approx((-0.232, 0.232)), "half the range on each side"


def test_the_right_size_is_always_in_the_picture_and_noise_does_not_fill_it():
    assert limits([record(1.0, 0.0, 1.001)] * 5) == pytest.approx((-0.0245, 0.0255))
    low, high = limits([record(2.0, 0.1, None)] * 5)
    assert low < 0 and high > 1.1
    low, high = limits([record(0.1, 90.0, 1.1)] * 5)
    assert -1.2 < low < -1, "less than none there is not"
    low, high = limits([record(None, None, None)] * 5)
    assert low < 0 < high
