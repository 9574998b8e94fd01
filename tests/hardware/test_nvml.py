"""Why there is no GPU, and what sensors say: every answer that NVML may give, simulated."""

import pynvml
import pytest
import torch
from devices import A100, CPU
from outcomes import refusal

from granite_scu.hardware import nvml
from granite_scu.hardware.machine import resolve_accelerator


@pytest.mark.parametrize(
    ("driver", "build", "visible", "found", "remedy"),
    [
        (None, "13.0", None, "no NVIDIA driver", "sudo ubuntu-drivers install"),
        (13, None, None, "PyTorch is built without CUDA", "setup_gpu"),
        (13, "13.0", "", "hidden by CUDA_VISIBLE_DEVICES=", "unset CUDA_VISIBLE_DEVICES"),
        (13, "13.0", "-1", "hidden by CUDA_VISIBLE_DEVICES=-1", "unset CUDA_VISIBLE_DEVICES"),
        (13, "13.0", "7", "CUDA_VISIBLE_DEVICES=7 names none of the GPUs here (0 Tesla T4)", "or name one of them"),
        (13, "13.0", None, "the driver offers no device", "nvidia-smi"),
        (
            12,
            "13.0",
            None,
            "driver 580.65.06 serves CUDA 12, and this PyTorch is built for CUDA 13",
            "update the driver",
        ),
    ],
)
def test_no_gpu_has_a_reason_in_one_line(machine, monkeypatch, driver, build, visible, found, remedy):
    machine(CPU, driver=driver, build=build, gpus=("Tesla T4",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.why_no_cuda()[0] == found and remedy in nvml.why_no_cuda()[1]
    message = refusal(resolve_accelerator, "auto")
    assert found in message and remedy in message and "--accelerator cpu" in message


def test_an_nvml_that_fails_is_no_machine_without_a_driver(machine, monkeypatch):
    machine(CPU)

    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert nvml.driver().problem == "RM has detected an NVML/RM version mismatch."
    found, remedy = nvml.why_no_cuda()
    assert "version mismatch" in found and remedy.startswith("restart the machine")


def test_sensors_say_what_they_can(machine, monkeypatch):
    machine(A100)

    def unsupported():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(torch.cuda, "utilization", lambda: 93)
    monkeypatch.setattr(torch.cuda, "temperature", unsupported)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 251_300)
    assert nvml.read_sensors() == {"gpu_utilisation": 93, "gpu_temperature_c": None, "gpu_power_w": 251.3}
