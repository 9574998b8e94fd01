"""Rates and memory, measured on this machine."""

import pytest
import torch
from devices import A100, CPU

from granite_scu.hardware import MemoryTracker, benchmark_dataloader, matmul_tflops


def test_the_rate_of_matrix_products_is_measured():
    assert 1e-4 < matmul_tflops("cpu", torch.float32, seconds=0.01) < 1e3


def test_measuring_leaves_the_runs_randomness_alone():
    before = torch.get_rng_state()
    matmul_tflops("cpu", torch.float32, seconds=0.001)
    assert torch.equal(before, torch.get_rng_state())


def test_a_loader_is_timed_after_its_first_batch():
    taken = []

    def batches():
        for number in range(100):
            taken.append(number)
            yield number

    assert 0 < benchmark_dataloader(batches(), num_batches=10) < 1
    assert len(taken) == 11
    assert benchmark_dataloader([1, 2, 3], num_batches=10) > 0


@pytest.mark.parametrize("loader", [[], [1]])
def test_a_loader_with_nothing_to_time_is_refused(loader):
    with pytest.raises(ValueError, match="nothing to time"):
        benchmark_dataloader(loader)


def test_memory_is_reported_as_the_guide_shows_it(machine, monkeypatch, capsys):
    machine(A100)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 14 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: round(39.5 * 2**30))
    tracker = MemoryTracker()
    tracker.update()
    tracker.report()
    shown = [
        "GPU Memory Usage:",
        "  Current: 14.00 GB",
        "  Peak: 39.50 GB",
        "  Total: 79.00 GB",
        "  Utilization: 50.0%",
    ]
    assert capsys.readouterr().out.splitlines() == shown


def test_without_a_gpu_there_is_no_memory_to_report(machine, capsys):
    machine(CPU)
    tracker = MemoryTracker()
    tracker.report()
    assert (tracker.current, tracker.peak, tracker.total) == (0.0, 0.0, 0.0)
    assert capsys.readouterr().out == "GPU Memory Usage: no GPU\n"
