"""The fastest that a device can multiply matrices, which model FLOPs utilisation (MFU) is a share of."""

import functools
import math
import re
import time
from dataclasses import dataclass

import torch

from granite_scu.hardware.detection import Device
from granite_scu.hardware.machine import taking_tf32


@dataclass(frozen=True)
class Peak:
    """A device's peak.

    Attributes:
        flops: operations a second, without sparsity.
        source: where the figure is from.
    """

    flops: float
    source: str


_HOPPER = "NVIDIA H100 datasheet"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU architecture whitepaper"

_CARDS = (
    (r"P100.*SXM2", 21.2, 10.6, "NVIDIA Tesla P100 datasheet"),
    (r"P100", 18.7, 9.3, "NVIDIA Tesla P100 datasheet"),
    (r"V100.*PCIE", 112, 14.0, "NVIDIA V100 datasheet"),
    (r"V100", 125, 15.7, "NVIDIA V100 datasheet"),
    (r"T4", 65, 8.1, "NVIDIA T4 datasheet"),
    (r"2080 Ti", 53.8, 13.4, "NVIDIA Turing GPU architecture whitepaper"),
    (r"A100", 312, 19.5, "NVIDIA A100 datasheet"),
    (r"A30", 165, 10.3, "NVIDIA A30 datasheet"),
    (r"A40", 149.7, 37.4, "NVIDIA A40 datasheet"),
    (r"A10", 125, 31.2, "NVIDIA A10 datasheet"),
    (r"A10G", 70, 31.5, "NVIDIA A10G datasheet"),
    (r"RTX A6000", 154.8, 38.7, "NVIDIA RTX A6000 datasheet, tensor figure halved: it counts sparsity"),
    (r"RTX 3080(?! Ti| Laptop)", 59.5, 29.8, _GA102),
    (r"RTX 3090(?! Ti)", 71, 35.6, _GA102),
    (r"RTX 4080(?! S| Laptop)", 97.5, 48.7, _ADA),
    (r"RTX 4090(?! D| Laptop)", 165.2, 82.6, _ADA),
    (r"L4", 121, 30.3, "NVIDIA L4 datasheet, tensor figure halved: it counts sparsity"),
    (r"L40S", 362, 91.6, "NVIDIA L40S datasheet"),
    (r"H100 PCIe", 756, 51, _HOPPER),
    (r"(H100|H200) NVL", 835, 60, f"{_HOPPER}, tensor figure halved: it counts sparsity"),
    (r"H100|G?H200", 989, 67, f"{_HOPPER}, tensor figure halved: it counts sparsity"),
    (r"G?B200", 2250, 75, "NVIDIA HGX B200 datasheet, an eighth of the board, tensor figure halved for sparsity"),
    (r"RTX 5070 Ti(?! Laptop)", 87.9, 43.9, _BLACKWELL_RTX),
    (r"RTX 5080(?! Laptop)", 112.6, 56.3, _BLACKWELL_RTX),
    (r"RTX 5090(?! D| Laptop)", 209.5, 104.8, _BLACKWELL_RTX),
)
"""A pattern of the name, the peaks of bf16 and fp16 on the tensor cores and of fp32 without them, in 1e12 operations a
second, all dense and summed in fp32, and the source. The first pattern that a device's name holds as whole words
counts. A card with two memory sizes has one row: its chip is one."""


def peak_flops(device: Device, precision: str, tf32: bool = False) -> Peak:
    """The peak of a device in a precision.

    The vendor's figure for matrix products without sparsity. Sheets since Ampere often print the double, which counts
    the products with zeros that 2:4 sparsity leaves out; GeForce cards sum fp16 products in fp32 at half the rate that
    their sheets advertise. For a CPU, and a card that no row knows, it is the rate of large matrix products measured
    now: a share of what the machine reaches, not of what a sheet promises.

    Args:
        device: what trains.
        precision: Lightning's, such as ``bf16-mixed``.
        tf32: whether fp32 products are taken in TF32, at half the rate of bf16 on every card that has it.
    """
    if printed := printed_peak(device, precision, tf32):
        return printed
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)
    rate = matmul_tflops(device.kind, dtype, tf32=tf32)
    return Peak(rate * 1e12, "measured: large matrix products on this machine")


def printed_peak(device: Device, precision: str, tf32: bool = False) -> Peak | None:
    """The vendor's figure alone, as ``peak_flops``; None for a part of a card (MIG), and one that no row knows."""
    whole = device.kind == "cuda" and "MIG" not in device.name
    for pattern, half, single, source in _CARDS if whole else ():
        if re.search(rf"\b({pattern})\b", device.name):
            single = max(single, half / 2) if tf32 else single
            return Peak((single if precision == "32-true" else half) * 1e12, source)
    return None


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
