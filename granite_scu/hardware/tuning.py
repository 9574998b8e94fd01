"""Settings of PyTorch that make it faster, or take less memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from granite_scu.hardware.cores import allowed
from granite_scu.hardware.detection import detect

MAX_WORKERS = 8
"""Loader processes beyond which none was ever of use; the text is tokenised before training."""


def set_tf32(on: bool) -> None:
    """Have PyTorch take fp32 products in TF32, which keeps ten bits of the mantissa, or in fp32."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


@contextmanager
def taking_tf32(on: bool) -> Iterator[None]:
    """``set_tf32``, for as long as the context lasts."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_tf32(on)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def optimize_pytorch_settings(config: dict[str, Any] | None = None) -> None:
    """Set what makes this process fast on its device.

    TF32 where the GPU has it, cuDNN's search for the fastest convolution, a thread for each core, an empty CUDA cache.

    Args:
        config: ``tf32``, ``cudnn_benchmark`` (both default to true) and ``num_threads`` (default: the cores that this
            process may use).

    Raises:
        ValueError: ``config`` holds another key.
    """
    settings = {"tf32": True, "cudnn_benchmark": True, "num_threads": allowed()}
    unknown = set(config or {}) - set(settings)
    if unknown:
        raise ValueError(f"unknown settings {sorted(unknown)}; known: {sorted(settings)}")
    settings |= config or {}
    set_tf32(bool(settings["tf32"]) and detect().supports_tf32)
    torch.backends.cudnn.benchmark = bool(settings["cudnn_benchmark"])
    torch.set_num_threads(int(settings["num_threads"]))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def enable_memory_efficient_mode() -> None:
    """Spend time to save memory: growing segments against fragmentation, no cuDNN workspaces, an empty CUDA cache.

    The allocator reads its setting when CUDA starts, so call this before anything is on the GPU.
    """
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    torch.backends.cudnn.benchmark = False
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def get_optimal_num_workers() -> int:
    """Loader processes for this machine: the cores that the training leaves, at most eight; none without a GPU.

    On a CPU the training takes every core, and text that is already tokenised needs none.
    """
    if not torch.cuda.is_available():
        return 0
    return max(0, min(MAX_WORKERS, allowed() // torch.cuda.device_count() - 1))


def compile_model(model: torch.nn.Module, mode: str = "default") -> torch.nn.Module:
    """The model, compiled by torch.compile at its first call.

    Args:
        model: what to compile.
        mode: ``default``, ``reduce-overhead`` or ``max-autotune``.

    Raises:
        ValueError: there is no such mode.
    """
    modes = ("default", "reduce-overhead", "max-autotune")
    if mode not in modes:
        raise ValueError(f"mode {mode!r}: choose {', '.join(modes)}")
    return torch.compile(model, mode=mode)
