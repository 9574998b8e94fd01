"""The machine is simulated: every device of the table is seen through the same calls as a real one."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from devices import A100, B200, P100, RTX_4090, T4, V100

from granite_scu.hardware import detection
from granite_scu.hardware.detection import GIB, detect, detect_all


@pytest.mark.parametrize("device", [P100, V100, T4, A100, RTX_4090, B200], ids=lambda device: device.name)
def test_a_gpu_is_described_as_it_is(machine, device):
    machine(device)
    assert detect() == device
    assert detect_all() == [device] * device.count


def test_the_cpu_is_described_when_it_is_asked_for(machine):
    machine(A100)
    assert detect("cpu").kind == "cpu"


@pytest.mark.parametrize(
    ("capabilities", "bf16"),
    [
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"avx512_bf16": False, "avx2": True}, False),
        ({}, False),
    ],
)
def test_bf16_on_a_cpu_follows_its_instructions(monkeypatch, capabilities, bf16):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    device = detect()
    assert device.supports_bf16 is bf16
    assert device.kind == "cpu" and device.capability is None and device.memory_gb > 0 and device.name


@pytest.mark.parametrize(
    ("limit", "gib"),
    [(f"{6 * GIB}", (6, 3)), (f"{64 * GIB}", (16, 12)), (f"{3 * GIB}", (3, 0)), ("max", (16, 12)), (None, (16, 12))],
)
def test_a_containers_limit_of_memory_counts_beside_the_machines(tmp_path, monkeypatch, limit, gib):
    """4 GiB are taken, of which 1 GiB is files."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=12 * GIB))
    texts = {"current": 4 * GIB, "stat": f"anon {3 * GIB}\ninactive_file {GIB}", **({"max": limit} if limit else {})}
    for name, text in texts.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(detection, "LIMITS", ((tmp_path / "memory.max", "memory.current", "inactive_file"),))
    assert tuple(size / GIB for size in detection.ram()) == gib
    assert detect("cpu").memory_gb == gib[0]


def test_a_torch_that_cannot_tell_means_no_bf16_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not detect().supports_bf16
