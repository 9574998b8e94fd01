"""What a person wants to know of the machine: what it is, which settings suit it, with which command to start."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from granite_scu.config.settings import BaseConfig, DataConfig, LoraConfig, Recomputed, TrainerConfig
from granite_scu.hardware import presets
from granite_scu.hardware.detection import GIB, MARGIN, detect
from granite_scu.hardware.machine import compiles, resolve_precision
from granite_scu.hardware.nvml import dotted, driver, why_no_cuda

Predictor = Callable[[BaseConfig, LoraConfig, int, int, str, str], int]
"""Says how many bytes training takes, as ``model.memory.of_default_model`` does."""


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


def get_recommended_config(predict: Predictor, keeps_products: bool = True) -> dict[str, Any]:
    """Settings for the device of this process, out of the preset that fits it.

    Args:
        predict: what training takes.
        keeps_products: whether compiled layers may recompute activations all but products.

    Returns:
        ``preset``, ``batch_size`` (blocks on each device), ``block_size`` (tokens), ``gradient_accumulation_steps``,
        ``num_workers``, ``gradient_checkpointing``, ``quantize_4bit``, ``compile``, ``compile_mode``, ``precision`` (as
        the Trainer takes it), ``mixed_precision`` and ``memory_gib_estimate``, what is predicted to be taken so. Where
        that is more than the card has, activations are recomputed, and then the batch is halved until it fits, and as
        many more are accumulated.
    """
    device = detect()
    name = presets.choose(device)
    chosen = presets.settings(name)
    base, data = BaseConfig(**chosen.get("base", {})), DataConfig(**chosen["data"])
    lora = LoraConfig(**chosen.get("lora", {}))
    trainer = chosen["trainer"]
    accumulated = trainer.get("accumulate_grad_batches", TrainerConfig.accumulate_grad_batches)
    precision = trainer.get("precision") or resolve_precision(None, device)
    kind = device.kind
    room = (1 - MARGIN) * GIB * device.memory_gb
    blocks = accumulated * data.batch_size
    compiled = compiles(device, here=False) if base.compile is None else base.compile
    ways: list[Recomputed] = ["selective"] if compiled and keeps_products else []
    for how in [False, *ways, True] if base.gradient_checkpointing is None else [base.gradient_checkpointing]:
        base = replace(base, gradient_checkpointing=how)
        taken = predict(base, lora, data.batch_size, data.block_size, precision, kind)
        if taken <= room:
            break
    while taken > room and data.batch_size % 2 == 0:
        data = replace(data, batch_size=data.batch_size // 2)
        taken = predict(base, lora, data.batch_size, data.block_size, precision, kind)
    return {
        "preset": name,
        "batch_size": data.batch_size,
        "block_size": data.block_size,
        "gradient_accumulation_steps": blocks // data.batch_size,
        "num_workers": data.num_workers,
        "gradient_checkpointing": base.gradient_checkpointing,
        "quantize_4bit": base.quantize_4bit,
        "compile": compiled,
        "compile_mode": base.compile_mode,
        "precision": precision,
        "mixed_precision": precision != "32-true",
        "memory_gib_estimate": round(taken / GIB, 1),
    }


def training_command() -> str:
    """The command that trains on this machine with the preset that fits it."""
    return f"granite-scu train --hardware {presets.choose(detect())} --data-dir my_texts/"
