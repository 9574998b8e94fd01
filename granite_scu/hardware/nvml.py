"""The driver, as NVML knows it, and what the sensors of a GPU say."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import pynvml

from granite_scu.config.errors import UserError

ON_THE_CPU = "or add --accelerator cpu to train on the CPU"
DRIVER_WANTED = (
    "where there is an NVIDIA GPU, install its driver: sudo ubuntu-drivers install (elsewhere: "
    "https://www.nvidia.com/drivers), then restart"
)


def dotted(capability: tuple[int, int] | None) -> str:
    """A compute capability as NVIDIA writes it, such as 8.0."""
    return ".".join(map(str, capability or ("none",)))


def install_command(tag: str, version: str) -> str:
    """The command that installs this build of PyTorch in place of whatever is there."""
    index = f"https://download.pytorch.org/whl/{tag}"
    return f"python -m pip install --force-reinstall torch=={version} --index-url {index}"


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this machine.

    Attributes:
        version: such as 580.65.06; null where NVML finds no driver, or fails.
        cuda_major: newest major version of CUDA that it serves; 0 without a driver.
        gpus: names of the GPUs that it has, in its own order, whatever CUDA_VISIBLE_DEVICES hides.
        problem: what NVML says in place of an answer; null where it answers, or where there is none to ask.
    """

    version: str | None
    cuda_major: int = 0
    gpus: tuple[str, ...] = ()
    problem: str | None = None


def driver() -> Driver:
    """What NVML says of the driver. A machine without one is no problem; one whose NVML fails has a ``problem``."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return Driver(None)
    except pynvml.NVMLError as error:
        return Driver(None, problem=str(error))
    try:
        cuda_major = pynvml.nvmlSystemGetCudaDriverVersion() // 1000
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return Driver(pynvml.nvmlSystemGetDriverVersion(), cuda_major, tuple(map(pynvml.nvmlDeviceGetName, handles)))
    except pynvml.NVMLError as error:
        return Driver(None, problem=str(error))
    finally:
        pynvml.nvmlShutdown()


def why_no_cuda() -> tuple[str, str]:
    """Why PyTorch finds no CUDA device, and what to do, commands first."""
    found = driver()
    if found.problem:
        return (
            f"NVML says {found.problem!r}",
            f"restart the machine, and if nvidia-smi fails still, install the driver anew, {ON_THE_CPU}",
        )
    if found.version is None:
        return "no NVIDIA driver", f"{DRIVER_WANTED}, {ON_THE_CPU}"
    import torch  # late: without a driver it is not needed

    if torch.version.cuda is None:
        build = install_command("cu130", torch.__version__.partition("+")[0])
        remedy = f"scripts/setup_gpu.sh (it runs {build}, or another build that fits the card)"
        return "PyTorch is built without CUDA", f"{remedy}, {ON_THE_CPU}"
    built_for = int(torch.version.cuda.split(".")[0])
    if found.cuda_major < built_for:
        return (
            f"driver {found.version} serves CUDA {found.cuda_major}, and this PyTorch is built for CUDA {built_for}",
            f"update the driver, or scripts/setup_gpu.sh (it takes a build that the driver serves), {ON_THE_CPU}",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return f"hidden by CUDA_VISIBLE_DEVICES={visible}", f"unset CUDA_VISIBLE_DEVICES, {ON_THE_CPU}"
    if visible is not None and found.gpus:
        there = ", ".join(f"{index} {name}" for index, name in enumerate(found.gpus))
        return (
            f"CUDA_VISIBLE_DEVICES={visible} names none of the GPUs here ({there})",
            f"unset CUDA_VISIBLE_DEVICES, or name one of them, {ON_THE_CPU}",
        )
    return "the driver offers no device", f"nvidia-smi (it says what is wrong), {ON_THE_CPU}"


def no_cuda(accelerator: str) -> UserError:
    """What a run is told that would need a CUDA device where there is none."""
    found, remedy = why_no_cuda()
    return UserError(
        f"--accelerator {accelerator}: no CUDA device: {found}; {remedy}, granite-scu train --test-run for a "
        "miniature run, or granite-scu check to see what is missing"
    )


SENSORS = ("gpu_utilisation", "gpu_temperature_c", "gpu_power_w")
"""Fields of a tick's record: percent of the last sample period (a sixth of a second to a second) in which a kernel ran,
degrees Celsius of the chip, watts drawn."""


def read_sensors() -> dict[str, float | None]:
    """What the current GPU tells of ``SENSORS`` now; null is what it does not tell."""
    import torch  # late: the rest of this file is asked before anything heavy is imported

    utilisation, temperature = _told(torch.cuda.utilization), _told(torch.cuda.temperature)
    milliwatts = _told(torch.cuda.power_draw)
    watts = None if milliwatts is None else milliwatts / 1000
    return dict(zip(SENSORS, (utilisation, temperature, watts), strict=True))


def _told(ask: Callable[[], int]) -> int | None:
    # A laptop's GPU tells no power, WSL no utilisation, a container may have no NVML at all: none of it ends a run.
    try:
        return ask()
    except (pynvml.NVMLError, RuntimeError, ModuleNotFoundError):
        return None
