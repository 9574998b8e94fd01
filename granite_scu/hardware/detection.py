"""The device that a process trains on, as torch sees it, the processor cores that others leave it, and the
memory that the process takes.

Threads that share a core wait for one another: under OpenMP a product is done when its last thread is, and a thread
whose core is taken comes late to each. On two cores, two threads beside another busy process train at a quarter of the
free speed, and one thread at more than half of it.
"""

import ctypes
import gc
import math
import os
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch

GIB = 2**30

MARGIN = 0.1
"""Share of a device's memory that is left alone: CUDA's own, workspaces of libraries, fragments, other programs."""


@dataclass(frozen=True)
class Device:
    """The device that a process trains on; of several GPUs, the first one visible.

    Attributes:
        kind: what PyTorch calls it.
        name: the maker's name.
        memory_gb: its memory, or the machine's for a CPU, in GiB.
        capability: CUDA compute capability (major, minor); null for a CPU.
        count: GPUs visible to this process; 1 for a CPU.
        supports_bf16: has bf16 matrix products in hardware.
        supports_tf32: has TF32 matrix products.
        supports_flash: can run the flash-attention kernels.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory_gb: float
    capability: tuple[int, int] | None
    count: int
    supports_bf16: bool
    supports_tf32: bool
    supports_flash: bool


def detect(accelerator: str = "auto") -> Device:
    """The device that ``--accelerator`` names: the GPU where there is one, unless the CPU is asked for."""
    if accelerator == "cpu" or not torch.cuda.is_available():
        return _detect_cpu()
    return _detect_gpu(0)


def detect_all() -> list[Device]:
    """Every visible GPU, in the order of their numbers."""
    return [_detect_gpu(index) for index in range(torch.cuda.device_count())]


def least_capable(gpus: list[Device]) -> Device:
    """The precision and the memory that all of them have: what several that train together are planned for."""
    return replace(min(gpus, key=lambda gpu: gpu.capability or (0, 0)), memory_gb=min(gpu.memory_gb for gpu in gpus))


def _detect_gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return gpu(properties.name, properties.total_memory / GIB, capability, torch.cuda.device_count())


def gpu(name: str, memory_gb: float, capability: tuple[int, int], count: int = 1) -> Device:
    """A GPU with what its compute capability says of it."""
    ampere = capability >= (8, 0)  # bf16, TF32 and the flash kernels all came with this generation
    return Device("cuda", name, memory_gb, capability, count, ampere, ampere, ampere)


def _detect_cpu() -> Device:
    # torch 2.10 cannot tell the processor's instruction sets, so that a CPU there trains in fp32.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    name = str(capabilities.get("cpu_name") or platform.processor() or platform.machine())
    fast_bf16 = any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16"))
    return Device("cpu", name, ram()[0] / GIB, None, 1, fast_bf16, supports_tf32=False, supports_flash=False)


QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""What a container may use (cgroup v2): microseconds of processor time or ``max``, and the period they are for."""

LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file"),
)
"""What a container may take of memory (cgroup v2, and v1), what it has taken, and the name in ``memory.stat`` of
what of that are files, which make way."""

SPARE = 0.4
"""Share of a core that others may use before a thread is given up for it."""


def allowed() -> int:
    """Cores that this process may use: those of its affinity, or fewer where a container's quota says so."""
    cores = len(_cores())
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.floor(int(quota) / int(period))))


def _cores() -> list[int]:
    """The numbers of the cores that this process may run on; where the system cannot tell, of all."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(psutil.cpu_count() or 1))


def ram() -> tuple[int, int]:
    """Bytes of the machine's memory in all, and of it free; fewer where a container's limit says so."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used, files in LIMITS:
        try:
            most, taken = (int(file.read_text(encoding="ascii")) for file in (limit, limit.with_name(used)))
            lines = limit.with_name("memory.stat").read_text(encoding="ascii").splitlines()
            free = min(free, most - taken + int(dict(map(str.split, lines))[files]))
        except (OSError, ValueError, KeyError):
            continue
        total = min(total, most)
    return total, max(0, free)


def free_gb() -> float:
    """GiB of the first GPU's memory that this process may still take: what nobody has, and what it holds unused."""
    try:
        free = torch.cuda.mem_get_info(0)[0]
    except RuntimeError:  # another process has the GPU to itself, and nothing is known
        return math.inf
    return (free + torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0)) / GIB


def threads_left(others: float, cores: int) -> int:
    """Threads that each have a core to themselves, where others keep ``others`` of ``cores`` busy; at least one."""
    return max(1, min(cores, math.floor(cores - others + SPARE)))


class _Reading(NamedTuple):
    """Seconds: of the clock, that the cores were busy, and that this process and its children used."""

    at: float
    busy: float
    own: float


class CompetingLoad:
    """How many cores other processes keep busy, of those that this one may use."""

    def __init__(self) -> None:
        self._cores = _cores()
        self._process = psutil.Process()
        self._last = self._read()

    @property
    def seconds(self) -> float:
        """Since the last reading."""
        return time.monotonic() - self._last.at

    def read(self) -> float:
        """Cores that others kept busy on average since the last reading."""
        before, self._last = self._last, self._read()
        elapsed = max(self._last.at - before.at, 1e-3)
        return max(0.0, (self._last.busy - before.busy) - (self._last.own - before.own)) / elapsed

    def _read(self) -> _Reading:
        each = psutil.cpu_times(percpu=True)
        busy = sum(_busy(each[core]) for core in self._cores if core < len(each))
        return _Reading(time.monotonic(), busy, self._used())

    def _used(self) -> float:
        mine = self._process.cpu_times()
        ended = mine.children_user + mine.children_system
        return mine.user + mine.system + ended + sum(map(_time_of, self._process.children(recursive=True)))


def _busy(times: NamedTuple) -> float:
    """Of a core's times, what it did not idle; a virtual machine's guests are in ``user`` already."""
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(value for name, value in times._asdict().items() if name not in idle)


def _time_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended
        return 0.0
    return times.user + times.system


def reset_peak_memory(device: str) -> int | None:
    """Forget the peak of this process's memory so far; returns the bytes in use now, None where nothing tells."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not Path("/proc/self/status").is_file():
        return None
    # What was freed goes back to the system, or the work would use it unseen.
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # a sandbox may refuse it, and the peak would be an older one
        return None
    return _status("VmRSS")


def peak_memory(device: str) -> int | None:
    """Most bytes in use since ``reset_peak_memory``: of the CUDA allocator, or resident in a CPU's memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # Not getrusage's ru_maxrss, which a new program inherits from the process that started it.
    return _status("VmHWM") if Path("/proc/self/status").is_file() else None


def _status(name: str) -> int | None:
    """A line of /proc/self/status, in bytes; None where the kernel, or what stands for one, has no such line."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
