import logging

import pytest
import torch

from granite_scu.training.callbacks import threads
from granite_scu.training.callbacks.threads import FreeCores, may_change


class Load:
    """Other load as it is told, asked once in a while."""

    seconds = threads.EVERY

    def __init__(self, *others: float):
        self.others = iter(others)

    def read(self) -> float:
        return next(self.others)


@pytest.fixture
def restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_follow_the_cores_that_others_leave_and_it_is_said_once(monkeypatch, caplog, restored):
    monkeypatch.setattr(threads, "allowed", lambda: 4)
    monkeypatch.setattr(logging.getLogger("granite_scu"), "propagate", True)
    caplog.set_level(logging.INFO)
    callback = FreeCores(Load(0.1, 2.1, 9.0, 0.0, 1.0))
    callback.on_train_start(None, None)
    seen = [torch.get_num_threads()]
    for _ in range(4):
        callback.on_train_batch_start(None, None)
        seen.append(torch.get_num_threads())
    assert seen == [4, 2, 1, 4, 3]
    said = [record.getMessage() for record in caplog.records if "cores busy" in record.getMessage()]
    assert said == ["other processes keep 2.1 of 4 cores busy: training continues in 2 threads while they do"]


def test_the_load_is_not_asked_at_every_batch(restored):
    load = Load()
    load.seconds = 0.1
    FreeCores(load).on_train_batch_start(None, None)


@pytest.mark.parametrize(
    ("accelerator", "deterministic", "fixed", "expected"),
    [("cpu", False, None, True), ("cpu", True, None, False), ("cpu", False, "2", False), ("cuda", False, None, False)],
)
def test_who_fixed_the_threads_keeps_them(monkeypatch, accelerator, deterministic, fixed, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if fixed:
        monkeypatch.setenv("OMP_NUM_THREADS", fixed)
    assert may_change(accelerator, deterministic) is expected
