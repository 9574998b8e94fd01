"""What a run is told to use, turned into what Lightning and PyTorch are told, or refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from granite_scu.config.errors import UserError
from granite_scu.config.settings import SHORT_PRECISIONS
from granite_scu.hardware.detection import Device
from granite_scu.hardware.nvml import no_cuda
from granite_scu.hardware.torch_build import dotted


def resolve_precision(requested: str | None, device: Device) -> str:
    """Lightning's precision for a run on ``device``.

    Args:
        requested: ``bf16-mixed``, ``16-mixed`` or ``32-true``; null or ``auto`` takes the fastest that is safe.
        device: what the run trains on.

    Raises:
        UserError: the device lacks what is asked for.
    """
    fitting = _fitting_precision(device)
    if requested is None or requested == "auto":
        return fitting
    flag = f"--precision {SHORT_PRECISIONS[requested]}"
    remedy = f"use --precision {SHORT_PRECISIONS[fitting]} or --precision auto"
    if requested == "bf16-mixed" and not device.supports_bf16:
        if device.kind == "cpu":
            raise UserError(f"{flag}: {device.name} has neither AMX nor AVX512-BF16, bf16 would be emulated; {remedy}")
        raise UserError(f"{flag}: {device.name} has compute capability {dotted(device.capability)}, not 8.0; {remedy}")
    if requested == "16-mixed" and device.kind != "cuda":
        raise UserError(f"{flag}: fp16 needs a CUDA device; {remedy}")
    return requested


def slow_four_bits(quantize_4bit: bool, precision: str, device: Device) -> str | None:
    """A warning in one line, where a GPU would multiply fp32 numbers made of 4-bit weights."""
    if not quantize_4bit or precision != "32-true" or device.kind != "cuda":
        return None
    fitting = SHORT_PRECISIONS[_fitting_precision(device)]
    if fitting == "fp32":
        return None
    return (
        f"--precision fp32: with --4bit-quantization every product is several times slower than in {fitting}, and the "
        f"weights are of 4 bits all the same; --precision {fitting} or auto is meant for it"
    )


def _fitting_precision(device: Device) -> str:
    if device.supports_bf16:
        return "bf16-mixed"
    volta_or_turing = device.capability is not None and device.capability >= (7, 0)
    return "16-mixed" if volta_or_turing else "32-true"  # before Volta, fp16 is slower than fp32


def resolve_accelerator(requested: str) -> Literal["cpu", "cuda"]:
    """Lightning's accelerator. A run without a GPU is refused unless the CPU is asked for.

    Args:
        requested: ``auto``, ``cpu``, ``cuda`` or ``gpu``.

    Raises:
        UserError: there is no CUDA device and the CPU was not asked for.
    """
    if requested == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    raise no_cuda(requested)


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
