"""What a person wants to know of the machine."""

from typing import Any

import torch

from granite_scu.hardware import presets
from granite_scu.hardware.detection import detect
from granite_scu.hardware.nvml import dotted, driver, why_no_cuda


def detect_gpu_info() -> dict[str, Any]:
    """The first GPU that this process sees, and its driver.

    Returns:
        ``cuda_available``, ``gpu_count``, ``gpu_name`` (None without a GPU), ``gpu_memory_gb`` (GiB, 0 without),
        ``compute_capability`` (such as "8.9"), ``supports_bfloat16``, ``supports_tf32``, ``supports_flash_attention``,
        ``driver_version``, ``cuda_version`` (of this PyTorch), ``pytorch_version``, ``preset`` (the name that
        ``--hardware auto`` stands for) and ``problem`` (why there is no GPU; None where there is one).
    """
    device, has_gpu = detect(), torch.cuda.is_available()
    return {
        "cuda_available": has_gpu,
        "gpu_count": device.count if has_gpu else 0,
        "gpu_name": device.name if has_gpu else None,
        "gpu_memory_gb": device.memory_gb if has_gpu else 0.0,
        "compute_capability": dotted(device.capability) if has_gpu else None,
        "supports_bfloat16": has_gpu and device.supports_bf16,
        "supports_tf32": has_gpu and device.supports_tf32,
        "supports_flash_attention": has_gpu and device.supports_flash,
        "driver_version": driver().version,
        "cuda_version": torch.version.cuda,
        "pytorch_version": torch.__version__,
        "preset": presets.choose(device),
        "problem": None if has_gpu else why_no_cuda()[0],
    }
