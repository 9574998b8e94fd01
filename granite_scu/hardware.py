"""The machine: what it has, and what a run on it uses.

Detection describes the device; ``resolve_*`` turn a request into what Lightning is told, or refuse it.
"""

import platform
import time
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from granite_scu.errors import UserError

GIB = 2**30

# Detection.


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
    if accelerator != "cpu" and torch.cuda.is_available():
        return _detect_cuda()
    return _detect_cpu()


def _detect_cuda() -> Device:
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    ampere = capability >= (8, 0)  # bf16, TF32 and the flash kernels all came with this generation
    memory = properties.total_memory / GIB
    return Device("cuda", properties.name, memory, capability, torch.cuda.device_count(), ampere, ampere, ampere)


def _detect_cpu() -> Device:
    capabilities = _cpu_capabilities()
    name = str(capabilities.get("cpu_name") or platform.processor() or platform.machine())
    fast_bf16 = any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16"))
    memory = psutil.virtual_memory().total / GIB
    return Device("cpu", name, memory, None, 1, fast_bf16, supports_tf32=False, supports_flash=False)


def _cpu_capabilities() -> dict[str, object]:
    """The processor's instruction sets; empty on torch 2.9, which cannot tell, so that a CPU there trains in fp32."""
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    return dict(get_capabilities()) if get_capabilities else {}


def matmul_tflops(device: Device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """The rate of large square matrix products, measured now, in units of 1e12 operations a second.

    Args:
        device: where to measure.
        dtype: element type of the factors.
        seconds: how long to measure; at least one product is timed.
    """
    size, burst = (4096, 10) if device.kind == "cuda" else (1024, 1)
    with torch.inference_mode():
        factor = torch.randn(size, size, device=device.kind, dtype=dtype)
        product = factor @ factor  # the first product loads the kernel
        _synchronize(device)
        start, products, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < seconds:
            for _ in range(burst):  # a GPU kept busy across products, not waiting for each one's launch
                torch.mm(factor, factor, out=product)
            _synchronize(device)
            products += burst
            elapsed = time.perf_counter() - start
    return 2 * size**3 * products / elapsed / 1e12


def _synchronize(device: Device) -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize()


# What a run uses.

_PRECISION_FLAGS = {"bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "fp32"}


def resolve_precision(requested: str | None, device: Device) -> str:
    """Lightning's precision for a run on ``device``.

    Args:
        requested: ``bf16-mixed``, ``16-mixed`` or ``32-true``; null or ``auto`` takes the fastest that is safe.
        device: what the run trains on.

    Raises:
        UserError: the device lacks what is asked for, or nothing of that name exists.
    """
    fitting = _fitting_precision(device)
    if requested is None or requested == "auto":
        return fitting
    if requested not in _PRECISION_FLAGS:
        names = ", ".join(f"{short} ({name})" for name, short in _PRECISION_FLAGS.items())
        raise UserError(f"--precision {requested}: unknown; choose auto, {names}")
    flag = f"--precision {_PRECISION_FLAGS[requested]}"
    remedy = f"use --precision {_PRECISION_FLAGS[fitting]} or --precision auto"
    if requested == "bf16-mixed" and not device.supports_bf16:
        if device.kind == "cpu":
            raise UserError(f"{flag}: {device.name} has neither AMX nor AVX512-BF16, bf16 would be emulated; {remedy}")
        raise UserError(f"{flag}: {device.name} has compute capability {dotted(device.capability)}, not 8.0; {remedy}")
    if requested == "16-mixed" and device.kind != "cuda":
        raise UserError(f"{flag}: fp16 needs a CUDA device; {remedy}")
    return requested


def _fitting_precision(device: Device) -> str:
    if device.supports_bf16:
        return "bf16-mixed"
    volta_or_turing = device.capability is not None and device.capability >= (7, 0)
    return "16-mixed" if volta_or_turing else "32-true"  # before Volta, fp16 is slower than fp32


def resolve_accelerator(requested: str, cpu_is_meant: bool) -> Literal["cpu", "cuda"]:
    """Lightning's accelerator. A run without a GPU is refused unless something says that the CPU is meant.

    Args:
        requested: ``auto``, ``cpu``, ``cuda`` or ``gpu``.
        cpu_is_meant: whether ``auto`` may fall back to the CPU, as a test run or a CPU preset says.

    Raises:
        UserError: there is no CUDA device and the CPU was not asked for, or nothing of that name exists.
    """
    if requested not in ("auto", "cpu", "cuda", "gpu"):
        raise UserError(f"--accelerator {requested}: unknown; choose auto, cpu or cuda")
    if requested == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if requested == "auto" and cpu_is_meant:
        return "cpu"
    raise UserError(
        f"--accelerator {requested}: no CUDA device; add --accelerator cpu to train on the CPU, "
        "--test-run for a miniature run, or run --check-requirements to see what is missing"
    )


def dotted(version: tuple[int, int] | None) -> str:
    """A compute capability as NVIDIA writes it, such as 8.0."""
    return "none" if version is None else ".".join(map(str, version))
