"""mamba-ssm's Triton kernels without its CUDA extensions."""

import contextlib
import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace

import torch


def without_cuda_extensions() -> None:
    """Let mamba-ssm's Triton kernels be imported: its ``__init__`` loads CUDA extensions, of which they need none."""
    if "mamba_ssm" in sys.modules:
        return
    root = importlib.util.find_spec("mamba_ssm").submodule_search_locations[0]
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.utils"):
        module = ModuleType(name)
        module.__path__ = [os.path.join(root, *name.split(".")[1:])]
        sys.modules[name] = module
    torch.cuda.device = lambda index: contextlib.nullcontext()  # there is none to switch to
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=1)
