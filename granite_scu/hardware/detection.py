"""The device that a process trains on, as torch sees it."""

import platform
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

GIB = 2**30

MARGIN = 0.1
"""Share of a device's memory that is left alone: CUDA's own, workspaces of libraries, fragments, other programs."""


@dataclass(frozen=True)
class Device:
    """The device that a process trains on; of several GPUs, the first one visible.

    Attributes:
        kind: what PyTorch calls it.
        name: the maker's name.
        memory_gb: its memory, or the machine's for a CPU, in GiB.
        capability: CUDA compute capability (major, minor); null for a CPU.
        count: GPUs visible to this process; 1 for a CPU.
        supports_bf16: has bf16 matrix products in hardware.
        supports_tf32: has TF32 matrix products.
        supports_flash: can run the flash-attention kernels.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory_gb: float
    capability: tuple[int, int] | None
    count: int
    supports_bf16: bool
    supports_tf32: bool
    supports_flash: bool


def detect(accelerator: str = "auto") -> Device:
    """The device that ``--accelerator`` names: the GPU where there is one, unless the CPU is asked for."""
    if accelerator == "cpu" or not torch.cuda.is_available():
        return _detect_cpu()
    return _detect_gpu(0)


def detect_all() -> list[Device]:
    """Every visible GPU, in the order of their numbers."""
    return [_detect_gpu(index) for index in range(torch.cuda.device_count())]


def least_capable(gpus: list[Device]) -> Device:
    """The GPU whose precision and memory all of them have: what several that train together are planned for."""
    return min(gpus, key=lambda gpu: (gpu.capability or (0, 0), gpu.memory_gb))


def _detect_gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return gpu(properties.name, properties.total_memory / GIB, capability, torch.cuda.device_count())


def gpu(name: str, memory_gb: float, capability: tuple[int, int], count: int = 1) -> Device:
    """A GPU with what its compute capability says of it."""
    ampere = capability >= (8, 0)  # bf16, TF32 and the flash kernels all came with this generation
    return Device("cuda", name, memory_gb, capability, count, ampere, ampere, ampere)


def _detect_cpu() -> Device:
    # torch 2.10 cannot tell the processor's instruction sets, so that a CPU there trains in fp32.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    name = str(capabilities.get("cpu_name") or platform.processor() or platform.machine())
    fast_bf16 = any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16"))
    memory = psutil.virtual_memory().total / GIB
    return Device("cpu", name, memory, None, 1, fast_bf16, supports_tf32=False, supports_flash=False)
