"""Compile a package's real Triton kernels for a GPU that is not there: compiler and ptxas run, nothing is launched.

    python compiling.py fla-core 80          compute capability 8.0

Prints a JSON object: kernels that compiled, the most shared memory of one in bytes and what the card has of it, and
what failed. Of an autotuner's configurations the first that fits the card is taken, as the tuner passes over others.
"""

import collections
import contextlib
import json
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from benchmarks.no_extensions import without_cuda_extensions
from research.counting.gpu_kernels import SHARED


class Offline(DriverBase):
    """Compiles for a target and has no device."""

    def __init__(self, capability: int):
        self.capability, self.found = capability, False
        properties = {
            "max_shared_mem": SHARED[capability], "multiprocessor_count": 100, "warpSize": 32, "max_num_regs": 65536,
        }  # fmt: skip
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def set_current_device(self, device):
        pass

    def get_benchmarker(self):
        def benchmark(kernel_call, quantiles, **_):
            if self.found:  # an earlier configuration fits the card
                return [2.0] * len(quantiles)
            kernel_call()
            self.found = True
            return [1.0] * len(quantiles)

        return benchmark


def offline(capability: int) -> dict:
    """Have Triton compile for a capability and launch nothing; returns what it will have compiled."""
    driver, most = Offline(capability), SHARED[capability]
    report = {"compiled": collections.Counter(), "largest": 0, "shared": most, "failed": []}
    triton.runtime.driver.set_active(driver)
    run, tune = JITFunction.run, Autotuner.run

    def tuned(self, *args, **kwargs):
        driver.found = False
        return tune(self, *args, **kwargs)

    def compiled(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.metadata.shared > most:
            raise OutOfResources(kernel.metadata.shared, most, "shared memory")
        report["compiled"][self.__name__] += 1
        report["largest"] = max(report["largest"], kernel.metadata.shared)
        return kernel

    Autotuner.run, JITFunction.run = tuned, compiled
    capabilities = divmod(capability, 10)
    torch.cuda.get_device_capability = lambda device=None: capabilities
    torch.cuda.get_device_name = lambda device=None: "NVIDIA"
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda index: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=100, shared_memory_per_block_optin=most, shared_memory_per_block=49152,
        major=capabilities[0], minor=capabilities[1], name="NVIDIA",
    )  # fmt: skip
    return report


def main(package: str, capability: int) -> dict:
    """Call the package's kernels at the sizes of Granite-4.0-H-1B, in the precision that such a card trains in."""
    report = offline(capability)
    if package == "mamba-ssm":
        without_cuda_extensions()
    from granite_scu.model.mamba2 import kernels, proof

    candidate, sizes = kernels.CANDIDATES[package](), proof.Sizes(heads=48, head_dim=64, groups=1, state=128)
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    for what, call, inputs in proof._cases(torch.device("cpu"), dtype, sizes):
        if package == "mamba-ssm" and "convolution" in what:  # not Triton's
            continue
        try:
            proof._results(call, candidate, inputs)
        except Exception as error:
            report["failed"].append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    return report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
