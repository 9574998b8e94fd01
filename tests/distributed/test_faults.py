"""Several processes: they stop together, and none waits for one that is gone."""

import os
import signal
import time
from datetime import timedelta

import killing
import pytest

from granite_scu.storage.run_folder import RunFolder

pytestmark = pytest.mark.distributed

FLAGS = (
    *("--test-run", "--samples", 0, "--precision", "fp32", "--block-size", 64, "--eval-iters", 2, "--max-steps", 12),
    *("--save-steps", 5, "--eval-steps", 4, "--control-every", 3, "--gradient-accumulation-steps", 2),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return killing.texts(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture
def start(text, tmp_path):
    """Starts a run of one process on a batch of four, or of two on two each; returns the process ids."""

    def start(name, processes, prepare=lambda rank: None, flags=FLAGS):
        line = [*flags, "--data-dir", text, "--output-dir", tmp_path / name, "--batch-size", 4 // processes]
        if processes == 1:
            return [killing.fork(line, tmp_path / f"{name}.log", lambda: prepare(0))]
        return killing.fork_two(line, [tmp_path / f"{name}{rank}.log" for rank in range(2)], prepare)

    return start


def codes(children):
    return [killing.wait(child) for child in children]


@pytest.mark.slow
@pytest.mark.parametrize("told", [pytest.param((0, 1), id="all"), pytest.param((1,), id="one")])
def test_processes_stop_together_and_save(start, tmp_path, told):
    children = start("cut", 2)
    killing.until(lambda: killing.ticks(tmp_path / "cut") >= 1)
    for rank in told:
        os.kill(children[rank], signal.SIGTERM)
    assert codes(children) == [143, 143]
    (*_, newest) = RunFolder(tmp_path / "cut").checkpoints()
    step = newest.name.removeprefix("checkpoint-")
    assert f"stopped by SIGTERM after step {step}, which is saved" in (tmp_path / "cut0.log").read_text()
    assert "error" not in (tmp_path / "cut1.log").read_text()
    assert codes(start("cut", 2, flags=(*FLAGS, "--resume-from-checkpoint", "last"))) == [0, 0]
    assert codes(start("whole", 2)) == [0, 0]
    one, other = (killing.outcome(tmp_path / name) for name in ("whole", "cut"))
    assert {name: one[name] == other[name] for name in one} == dict.fromkeys(one, True)


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_is_killed_takes_the_others_along(start, tmp_path, lost):
    children = start("cut", 2)
    killing.until(lambda: killing.ticks(tmp_path / "cut") >= 1)
    os.kill(children[lost], signal.SIGKILL)
    expected = [1, 1]
    expected[lost] = -signal.SIGKILL
    assert codes(children) == expected
    assert "another process of this run was lost" in (tmp_path / f"cut{1 - lost}.log").read_text()


@pytest.mark.slow
def test_a_process_that_falls_silent_is_taken_for_lost(start, tmp_path):
    from granite_scu.training import trainer
    from granite_scu.training.callbacks import signals as graceful_stop

    def soon(rank):
        trainer.LOST_AFTER = graceful_stop.LOST_AFTER = timedelta(seconds=3)

    children = start("cut", 2, soon)
    killing.until(lambda: killing.ticks(tmp_path / "cut") >= 1)
    os.kill(children[1], signal.SIGSTOP)
    asked = time.monotonic()
    assert killing.wait(children[0]) == 1
    assert 2 < time.monotonic() - asked < 30
    assert "another process of this run was lost" in (tmp_path / "cut0.log").read_text()
    os.kill(children[1], signal.SIGKILL)
    killing.wait(children[1])


@pytest.mark.slow
def test_processes_that_read_other_texts_or_chose_other_kernels_are_refused(start, tmp_path):
    def unlike(rank):
        from granite_scu.data.datamodule import TextDataModule
        from granite_scu.model.mamba2 import mamba

        TextDataModule.checksum = property(lambda data: f"text {rank}")
        mamba.kernels_in_use = lambda model: mamba.Kernels(f"those of {rank}", mamba.TORCH.scan, mamba.TORCH.conv)

    assert codes(start("cut", 2, unlike)) == [2, 2]
    words = (
        "the processes have different values of --kernels (auto: those that proved right on a process's GPU), the "
        "text of --data-dir (its checksum); start them all"
    )
    assert all(words in (tmp_path / f"cut{rank}.log").read_text() for rank in range(2))
