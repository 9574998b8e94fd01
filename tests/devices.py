"""Devices to simulate: the ``machine`` fixture puts them behind torch and NVML."""

from granite_scu.hardware import Device


def gpu(name: str, memory_gb: float, capability: tuple[int, int], count: int = 1) -> Device:
    ampere = capability >= (8, 0)
    return Device("cuda", name, memory_gb, capability, count, ampere, ampere, ampere)


P100 = gpu("Tesla P100-PCIE-16GB", 16.0, (6, 0))
V100 = gpu("Tesla V100-SXM2-16GB", 16.0, (7, 0))
T4 = gpu("Tesla T4", 15.0, (7, 5))
A100 = gpu("NVIDIA A100-SXM4-80GB", 79.0, (8, 0), count=2)
RTX_4090 = gpu("NVIDIA GeForce RTX 4090", 23.5, (8, 9))
B200 = gpu("NVIDIA B200", 178.0, (10, 0))
CPU = Device("cpu", "Plain CPU", 16.0, None, 1, supports_bf16=False, supports_tf32=False, supports_flash=False)
AMX = Device("cpu", "AMX CPU", 64.0, None, 1, supports_bf16=True, supports_tf32=False, supports_flash=False)
