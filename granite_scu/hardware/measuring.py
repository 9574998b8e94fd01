"""What is measured on the spot: the rate of matrix products, and the memory that a process takes."""

import ctypes
import functools
import gc
import math
import time
from pathlib import Path

import torch

from granite_scu.hardware.precision import taking_tf32


@functools.cache
def matmul_tflops(device: str, dtype: torch.dtype, seconds: float = 0.05, tf32: bool = False) -> float:
    """The rate of large square matrix products, in units of 1e12 operations a second; measured once in a process.

    Of the fastest products: what others take of the machine meanwhile is none of its own limits.

    Args:
        device: ``cpu`` or ``cuda``, where to measure.
        dtype: element type of the factors.
        seconds: how long to measure; at least one product is timed.
        tf32: whether products of fp32 are taken in TF32.
    """
    size, burst = (4096, 10) if device == "cuda" else (1024, 1)
    with torch.inference_mode(), taking_tf32(tf32):
        # Zeros would draw less power and so run faster; the seed of the run is left alone.
        generator = torch.Generator(device).manual_seed(0)
        factor = torch.randn(size, size, device=device, dtype=dtype, generator=generator)
        product = factor @ factor  # the first product loads the kernel
        _synchronize(device)
        begin = start = time.perf_counter()
        fastest = math.inf
        while start - begin < seconds:
            for _ in range(burst):  # a GPU kept busy across products, not waiting for each one's launch
                torch.mm(factor, factor, out=product)
            _synchronize(device)
            end = time.perf_counter()
            fastest, start = min(fastest, end - start), end
    return 2 * size**3 * burst / fastest / 1e12


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak_memory(device: str) -> int | None:
    """Forget the peak of this process's memory so far; returns the bytes in use now, None where nothing tells."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not Path("/proc/self/status").is_file():
        return None
    # What was freed goes back to the system, or the work would use it unseen.
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # a sandbox may refuse it, and the peak would be an older one
        return None
    return _status("VmRSS")


def peak_memory(device: str) -> int | None:
    """Most bytes in use since ``reset_peak_memory``: of the CUDA allocator, or resident in a CPU's memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # Not getrusage's ru_maxrss, which a new program inherits from the process that started it.
    return _status("VmHWM") if Path("/proc/self/status").is_file() else None


def _status(name: str) -> int | None:
    """A line of /proc/self/status, in bytes; None where the kernel, or what stands for one, has no such line."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
