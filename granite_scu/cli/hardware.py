"""``granite-scu hardware``: what this machine is and which settings suit it."""

import argparse
import json
import math
from typing import Any

from granite_scu.cli.console import make_console, print_facts
from granite_scu.config.launcher import launched_processes
from granite_scu.config.settings import SHORT_PRECISIONS
from granite_scu.hardware import presets

EXAMPLES = ("", "--gpu", "--json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--gpu", action="store_true", help="only whether there is a GPU that PyTorch can use; exit code "
                       "1 where there is none")  # fmt: skip
    asked.add_argument("--json", action="store_true", help="everything, as JSON")


def run(options: argparse.Namespace) -> int:
    """Print what is asked for; returns the exit code."""
    if options.gpu:
        return _say_gpu()
    if options.json:
        print(json.dumps({"info": detect_gpu_info(), "recommended": get_recommended_config()}, indent=2))
    else:
        print_hardware_info()
    return 0


def _say_gpu() -> int:
    from granite_scu.hardware.nvml import why_no_cuda

    info = detect_gpu_info()
    if not info["cuda_available"]:
        found, remedy = why_no_cuda()
        print(f"no GPU: {found}; {remedy}")
        return 1
    capability = info["compute_capability"]
    print(f"{info['gpu_count']} x {info['gpu_name']}, {info['gpu_memory_gb']:.1f} GiB, compute capability {capability}")
    return 0


def print_hardware_info() -> None:
    """Print what ``detect_gpu_info`` and ``get_recommended_config`` say, and the command that trains with it."""
    from granite_scu.hardware.detection import detect

    console, info, device = make_console(), detect_gpu_info(), detect()
    found = {
        "GPU": f"{info['gpu_count']} x {info['gpu_name']}" if info["gpu_name"] else f"none: {info['problem']}",
        "memory": f"{device.memory_gb:.1f} GiB",
        "compute capability": info["compute_capability"] or "none: a CPU",
        "BFloat16": _yes(device.supports_bf16),
        "TF32": _yes(info["supports_tf32"]),
        "flash attention": _yes(info["supports_flash_attention"]),
        "driver": info["driver_version"] or "none",
        "PyTorch": f"{info['pytorch_version']}, CUDA {info['cuda_version'] or 'none'}",
        **({"CPU": device.name} if device.kind == "cpu" else {}),
    }
    print_facts("this machine", found, console)
    recommended = get_recommended_config()
    print_facts("recommended", _described(recommended), console)
    console.print(f"train with it:  {_command(recommended)}", highlight=False, soft_wrap=True)


def detect_gpu_info() -> dict[str, Any]:
    """The first GPU that this process sees, and its driver.

    Returns:
        ``cuda_available``, ``gpu_count``, ``gpu_name`` (None without a GPU), ``gpu_memory_gb`` (GiB, 0 without),
        ``compute_capability`` (such as "8.9"), ``supports_bfloat16``, ``supports_tf32``, ``supports_flash_attention``,
        ``driver_version``, ``cuda_version`` (of this PyTorch), ``pytorch_version``, ``preset`` (the name that
        ``--hardware auto`` stands for) and ``problem`` (why there is no GPU; None where there is one).
    """
    import torch  # late: it takes seconds

    from granite_scu.hardware.detection import detect
    from granite_scu.hardware.nvml import dotted, driver, why_no_cuda

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


def get_recommended_config() -> dict[str, Any]:
    """Settings for the device of this process: those of a run of the default model with the preset that fits it.

    Returns:
        ``preset``, ``batch_size`` (blocks on each device), ``block_size`` (tokens), ``gradient_accumulation_steps``,
        ``num_workers``, ``gradient_checkpointing``, ``quantize_4bit``, ``compile``, ``compile_mode``, ``precision`` (as
        the Trainer takes it), ``mixed_precision`` and ``memory_gib_estimate``, what is predicted to be taken so. Where
        the preset's batch is predicted to take more than there is, the largest that fits is recommended.
    """
    from granite_scu.cli.config_layers import Layers  # late, as the next ones: torch and transformers take seconds
    from granite_scu.hardware.detection import GIB, detect
    from granite_scu.hardware.machine import resolve_request
    from granite_scu.training import memory_budget

    preset = presets.choose(detect())
    request = Layers([], [], preset).request()
    # As one of several tasks, each of which may ask.
    if math.prod(launched_processes() or (1,)) > 1:
        request = request.with_values({"run.multi_gpu": True})
    machine = resolve_request(request)
    request = memory_budget.with_checkpointing_settled(request, machine)
    largest = memory_budget.largest_that_fits(request, machine, request.data.batch_size)
    request = largest or memory_budget.with_batch(request, 1)
    return {
        "preset": preset,
        "batch_size": request.data.batch_size,
        "block_size": request.data.block_size,
        "gradient_accumulation_steps": request.trainer.accumulate_grad_batches,
        "num_workers": request.data.num_workers,
        "gradient_checkpointing": request.base.gradient_checkpointing,
        "quantize_4bit": request.base.quantize_4bit,
        "compile": machine.compiled,
        "compile_mode": request.base.compile_mode,
        "precision": machine.precision,
        "mixed_precision": machine.precision != "32-true",
        "memory_gib_estimate": round(memory_budget.predict(request, machine).total / GIB, 1),
    }


def _described(advice: dict[str, Any]) -> dict[str, str]:
    """What ``get_recommended_config`` says, for people."""
    tokens = f"{advice['batch_size']} x {advice['block_size']} tokens"
    workers, how = advice["num_workers"], advice["gradient_checkpointing"]
    return {
        "preset": advice["preset"],
        "batch": f"{tokens} x {advice['gradient_accumulation_steps']} accumulated",
        "precision": SHORT_PRECISIONS.get(advice["precision"], advice["precision"]),
        "base model in 4 bits": _yes(advice["quantize_4bit"]),
        "compiled layers": _yes(advice["compile"]),
        "activations computed again": {"selective": "all but products"}.get(how, _yes(how)),
        "processes that load data": str(workers) if workers else "none but the training's own",
        "memory, predicted": f"{advice['memory_gib_estimate']} GiB",
    }


def _command(recommended: dict[str, Any]) -> str:
    """The command that trains with what ``get_recommended_config`` says."""
    preset, batch = recommended["preset"], recommended["batch_size"]
    smaller = f"--batch-size {batch} " if batch < presets.settings(preset)["data"]["batch_size"] else ""
    return f"granite-scu train --hardware {preset} {smaller}--data-dir my_texts/"


def _yes(has: bool) -> str:
    return "yes" if has else "no"
