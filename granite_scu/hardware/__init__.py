"""The machine: what it has, what of it a run is given, and how it is kept busy."""

from granite_scu.hardware.advice import detect_gpu_info, get_recommended_config, print_hardware_info
from granite_scu.hardware.detection import GIB, MARGIN, Device, detect, detect_all
from granite_scu.hardware.measuring import MemoryTracker, benchmark_dataloader, matmul_tflops
from granite_scu.hardware.peaks import Peak, peak_flops
from granite_scu.hardware.precision import resolve_accelerator, resolve_precision
from granite_scu.hardware.tuning import (
    compile_model,
    enable_memory_efficient_mode,
    get_optimal_num_workers,
    optimize_pytorch_settings,
    set_tf32,
)

__all__ = [
    "GIB",
    "MARGIN",
    "Device",
    "MemoryTracker",
    "Peak",
    "benchmark_dataloader",
    "compile_model",
    "detect",
    "detect_all",
    "detect_gpu_info",
    "enable_memory_efficient_mode",
    "get_optimal_num_workers",
    "get_recommended_config",
    "matmul_tflops",
    "optimize_pytorch_settings",
    "peak_flops",
    "print_hardware_info",
    "resolve_accelerator",
    "resolve_precision",
    "set_tf32",
]
