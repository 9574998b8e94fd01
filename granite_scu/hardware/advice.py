"""What a person wants to know of the machine: what it is, which settings suit it, with which command to start."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from granite_scu.config.settings import SHORT_PRECISIONS, BaseConfig, DataConfig, LoraConfig, TrainerConfig
from granite_scu.hardware import presets
from granite_scu.hardware.detection import GIB, MARGIN, detect
from granite_scu.hardware.machine import resolve_precision
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


def get_recommended_config(predict: Predictor) -> dict[str, Any]:
    """Settings for the device of this process, out of the preset that fits it; ``predict`` says what training takes.

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
    taken = predict(base, lora, data.batch_size, data.block_size, precision, kind)
    if taken > room and base.gradient_checkpointing is None:
        base = replace(base, gradient_checkpointing=True)
        taken = predict(base, lora, data.batch_size, data.block_size, precision, kind)
    while taken > room and data.batch_size % 2 == 0:
        data = replace(data, batch_size=data.batch_size // 2)
        taken = predict(base, lora, data.batch_size, data.block_size, precision, kind)
    return {
        "preset": name,
        "batch_size": data.batch_size,
        "block_size": data.block_size,
        "gradient_accumulation_steps": blocks // data.batch_size,
        "num_workers": data.num_workers,
        "gradient_checkpointing": bool(base.gradient_checkpointing),
        "quantize_4bit": base.quantize_4bit,
        "compile": kind == "cuda" if base.compile is None else base.compile,
        "compile_mode": base.compile_mode,
        "precision": precision,
        "mixed_precision": precision != "32-true",
        "memory_gib_estimate": round(taken / GIB, 1),
    }


def print_hardware_info(predict: Predictor) -> None:
    """Print what ``detect_gpu_info`` and ``get_recommended_config`` say, and the command that trains with it."""
    console = Console()
    info, device = detect_gpu_info(), detect()
    found = {
        "GPU": f"{info['gpu_count']} x {info['gpu_name']}" if info["gpu_name"] else f"none: {info['problem']}",
        "memory": f"{device.memory_gb:.1f} GiB",
        "compute capability": info["compute_capability"] or "none: a CPU",
        "BFloat16": _yes(device.supports_bf16),
        "TF32": _yes(info["supports_tf32"]),
        "flash attention": _yes(info["supports_flash_attention"]),
        "driver": info["driver_version"] or "none",
        "PyTorch": f"{info['pytorch_version']}, CUDA {info['cuda_version'] or 'none'}",
    }
    if device.kind == "cpu":
        found["CPU"] = device.name
    for title, rows in (("this machine", found), ("recommended", _described(get_recommended_config(predict)))):
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
    console.print(f"train with it:  {training_command()}", highlight=False, soft_wrap=True)


def _described(advice: dict[str, Any]) -> dict[str, str]:
    """What ``get_recommended_config`` says, for people."""
    tokens = f"{advice['batch_size']} x {advice['block_size']} tokens"
    workers = advice["num_workers"]
    return {
        "preset": advice["preset"],
        "batch": f"{tokens} x {advice['gradient_accumulation_steps']} accumulated",
        "precision": SHORT_PRECISIONS.get(advice["precision"], advice["precision"]),
        "base model in 4 bits": _yes(advice["quantize_4bit"]),
        "compiled layers": _yes(advice["compile"]),
        "activations computed again": _yes(advice["gradient_checkpointing"]),
        "processes that load data": str(workers) if workers else "none but the training's own",
        "memory, predicted": f"{advice['memory_gib_estimate']} GiB",
    }


def training_command() -> str:
    """The command that trains on this machine with the preset that fits it."""
    return f"granite-scu train --hardware {presets.choose(detect())} --data-dir my_texts/"


def _yes(has: bool) -> str:
    return "yes" if has else "no"
