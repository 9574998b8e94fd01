"""Settings of PyTorch: each does what its name says, and is put back afterwards."""

import os

import pytest
import torch
from devices import A100, CPU, T4

from granite_scu.hardware import (
    compile_model,
    enable_memory_efficient_mode,
    get_optimal_num_workers,
    optimize_pytorch_settings,
)


@pytest.fixture(autouse=True)
def _put_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    threads = torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = before[1:]
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("device", "config", "products"),
    [(A100, None, "high"), (A100, {"tf32": False}, "highest"), (T4, None, "highest"), (CPU, None, "highest")],
)
def test_tf32_is_used_where_the_gpu_has_it(machine, device, config, products):
    machine(device)
    optimize_pytorch_settings(config)
    assert torch.get_float32_matmul_precision() == products
    assert torch.backends.cudnn.allow_tf32 is (products == "high") and torch.backends.cudnn.benchmark


def test_threads_are_set_and_unknown_settings_refused(machine):
    machine(CPU)
    optimize_pytorch_settings({"num_threads": 1, "cudnn_benchmark": False})
    assert torch.get_num_threads() == 1 and not torch.backends.cudnn.benchmark
    with pytest.raises(ValueError, match=r"unknown settings \['tf_32'\]"):
        optimize_pytorch_settings({"tf_32": True})


def test_memory_is_saved_by_growing_segments(machine):
    machine(A100)
    enable_memory_efficient_mode()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and not torch.backends.cudnn.benchmark


def test_workers_share_the_cores_among_the_gpus(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    machine(A100)  # two of them
    assert get_optimal_num_workers() == 5
    machine(T4)
    assert get_optimal_num_workers() == 8
    machine(CPU)
    assert get_optimal_num_workers() == 0


def test_a_compiled_model_says_the_same():
    model = torch.nn.Linear(3, 2)
    compiled = compile_model(model, mode="reduce-overhead")
    assert isinstance(compiled, torch._dynamo.OptimizedModule) and compiled.weight is model.weight
    with pytest.raises(ValueError, match="mode 'fast'"):
        compile_model(model, mode="fast")
