import pytest

from granite_scu.training.callbacks import throughput as stopwatch
from granite_scu.training.callbacks.throughput import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def test_it_runs_while_training_and_stands_still_during_validation(clock):
    watch = Stopwatch()
    clock.now = 150.0
    watch.on_train_start(None, None)
    clock.now = 160.0
    assert watch.seconds == 10
    watch.on_validation_start(None, None)
    clock.now = 1000.0
    assert watch.seconds == 10
    watch.on_validation_end(None, None)
    clock.now = 1005.0
    assert watch.seconds == 15
    watch.stop()
    assert watch.seconds == 15


def test_the_rate_is_of_the_time_since_the_last_reading(clock):
    watch = Stopwatch()
    watch.start()
    clock.now += 10
    assert watch.rate(500) == 50
    clock.now += 5
    assert watch.rate(600) == 20
    assert watch.rate(700) == 0  # no time has passed


def test_a_resumed_run_goes_on_from_the_time_and_the_count_of_its_checkpoint(clock):
    before = Stopwatch()
    before.start()
    clock.now += 10
    before.rate(500)
    clock.now += 2
    state = before.state_dict()

    clock.now += 10_000
    resumed = Stopwatch()
    resumed.load_state_dict(state)
    resumed.start()
    clock.now += 2
    assert resumed.seconds == 14
    assert resumed.rate(540) == 10  # 40 tokens in the 2 seconds before the checkpoint and the 2 after it


def test_the_time_of_a_resumed_run_has_all_its_parts(clock):
    before = Stopwatch()
    clock.now += 30  # of which none is training
    state = before.state_dict()
    assert state["wall"] == 30

    clock.now += 10_000
    resumed = Stopwatch()
    clock.now += 5  # until the checkpoint is read
    resumed.load_state_dict(state)
    clock.now += 7
    assert resumed.wall_seconds == 42
