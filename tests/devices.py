"""Devices to simulate: the ``machine`` fixture puts them behind torch and NVML."""

from granite_scu.hardware import Device


def gpu(name: str, memory_gb: float, capability: tuple[int, int], count: int = 1) -> Device:
    ampere = capability >= (8, 0)
    return Device("cuda", name, memory_gb, capability, count, ampere, ampere, ampere)


P100 = gpu("Tesla P100-PCIE-16GB", 16.0, (6, 0))
V100 = gpu("Tesla V100-SXM2-16GB", 16.0, (7, 0))
V100_32 = gpu("Tesla V100-PCIE-32GB", 31.7, (7, 0))
T4 = gpu("Tesla T4", 15.0, (7, 5))
RTX_2080_TI = gpu("NVIDIA GeForce RTX 2080 Ti", 10.8, (7, 5))
RTX_3060 = gpu("NVIDIA GeForce RTX 3060", 11.8, (8, 6))
RTX_3080 = gpu("NVIDIA GeForce RTX 3080", 9.6, (8, 6))
RTX_3080_12 = gpu("NVIDIA GeForce RTX 3080", 11.8, (8, 6))
RTX_3090 = gpu("NVIDIA GeForce RTX 3090", 23.6, (8, 6))
RTX_4060_LAPTOP = gpu("NVIDIA GeForce RTX 4060 Laptop GPU", 7.6, (8, 9))
RTX_4080 = gpu("NVIDIA GeForce RTX 4080", 15.6, (8, 9))
RTX_4090 = gpu("NVIDIA GeForce RTX 4090", 23.5, (8, 9))
RTX_5090 = gpu("NVIDIA GeForce RTX 5090", 31.4, (12, 0))
RTX_5080 = gpu("NVIDIA GeForce RTX 5080", 15.5, (12, 0))
RTX_5070 = gpu("NVIDIA GeForce RTX 5070", 11.5, (12, 0))
A10 = gpu("NVIDIA A10", 22.0, (8, 6))
A10G = gpu("NVIDIA A10G", 22.0, (8, 6))
A30X2 = gpu("NVIDIA A30", 23.5, (8, 0), count=2)
A40 = gpu("NVIDIA A40", 44.4, (8, 6))
A6000 = gpu("NVIDIA RTX A6000", 47.5, (8, 6))
A100_40 = gpu("NVIDIA A100-SXM4-40GB", 39.4, (8, 0))
A100 = gpu("NVIDIA A100-SXM4-80GB", 79.0, (8, 0), count=2)
L4 = gpu("NVIDIA L4", 22.0, (8, 9))
RTX_6000_ADA = gpu("NVIDIA RTX 6000 Ada Generation", 47.5, (8, 9))
QUADRO_5000 = gpu("Quadro RTX 5000", 15.7, (7, 5))
H100 = gpu("NVIDIA H100 80GB HBM3", 79.1, (9, 0))
H200X8 = gpu("NVIDIA H200", 139.8, (9, 0), count=8)
B200 = gpu("NVIDIA B200", 178.0, (10, 0))
CPU = Device("cpu", "Plain CPU", 16.0, None, 1, supports_bf16=False, supports_tf32=False, supports_flash=False)
AMX = Device("cpu", "AMX CPU", 64.0, None, 1, supports_bf16=True, supports_tf32=False, supports_flash=False)
