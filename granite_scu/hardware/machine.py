"""Which processes, devices, precision and kernels a run gets on this machine."""

import logging
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from granite_scu.config import launcher
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import SHORT_PRECISIONS
from granite_scu.hardware import detection, presets
from granite_scu.hardware.detection import GIB, MARGIN, Device, ram
from granite_scu.hardware.nvml import dotted, no_cuda

log = logging.getLogger(__name__)

GRAPHS = "reduce-overhead"
"""The ``--compile-mode`` that records CUDA graphs."""

TRITON_FROM = (7, 0)
"""Compute capability from which Triton compiles."""


@dataclass(frozen=True)
class Machine:
    """What the run will run on, resolved.

    Attributes:
        device: what was found; of several unlike GPUs, what all of them have.
        accelerator: "cpu" or "cuda".
        precision: one of Lightning's precision strings.
        devices: processes on this node.
        nodes: machines.
        attention: transformers' attention implementation.
        kernels: what the Mamba-2 layers may take; ``model.mamba2.kernels.check`` refuses what is not here.
        compiled: whether the decoder's layers are compiled.
        sharded: whether the frozen layers are shared out over the processes.
        tf32: whether the model's fp32 products are taken in TF32.
        free_gb: memory that no process had taken, GiB; of a GPU all of it where it is planned for, or where several
            processes have to come to the same. It is asked once: what one part of a run settles by it has to hold for
            the next.
    """

    device: Device
    accelerator: str
    precision: str
    devices: int
    nodes: int
    attention: str
    kernels: str
    compiled: bool
    sharded: bool
    tf32: bool
    free_gb: float

    @property
    def world_size(self) -> int:
        return self.devices * self.nodes

    @property
    def torch_device(self) -> torch.device:
        """The device of this process: a model is loaded onto it, and not onto the first GPU by every process."""
        if self.accelerator == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", launcher.local_rank())

    def memory_limit(self, memory_fraction: float | None) -> float:
        """Bytes that a process may take: that share of its GPU's memory, as far as it is free, or of what a CPU's has
        free as much as each other process of this machine, ``MARGIN`` left out."""
        cuda = self.accelerator == "cuda"
        most = self.device.memory_gb * (memory_fraction or 1) if cuda else self.free_gb / self.devices
        return min(most, self.free_gb) * GIB * (1 - MARGIN)

    def claim(self, memory_fraction: float | None) -> None:
        """Make this process's GPU the current one, take no more of it than ``memory_fraction``, and TF32 or not."""
        if self.accelerator == "cuda":
            torch.cuda.set_device(self.torch_device)
            if memory_fraction:
                torch.cuda.set_per_process_memory_fraction(memory_fraction, self.torch_device)
            set_tf32(self.tf32)


def resolve_request(request: Request, card: Device | None = None) -> Machine:
    """What a request stands for here, or on a ``card`` that is not here.

    Raises:
        UserError: this machine, or the card, lacks something that was asked for, by a flag or by a preset.
    """
    try:
        return _resolve(request, card)
    except UserError as error:  # what a preset asks for is in no flag that was given
        device = detection.detect(asked := request.trainer.accelerator)
        warning = presets.mismatch(request.hardware, device)
        if warning and (device.kind == "cuda" or asked == "cpu"):  # otherwise it is a GPU that is missing
            raise UserError(f"{error}; {warning}") from error
        raise


def _resolve(request: Request, card: Device | None) -> Machine:
    base, run, trainer, isolate = request.base, request.run, request.trainer, request.data.isolate_documents
    accelerator = "cuda" if card else resolve_accelerator(trainer.accelerator)
    device = card or detection.detect(accelerator)
    if card:  # what launched this process tells nothing of another machine
        devices, nodes = (card.count if run.on_several else 1), 1
    else:
        devices, nodes = processes_for(run.on_several, device.kind, gpus_of(run.gpus, device))
    if device.kind == "cuda" and devices > 1 and not card:
        device = detection.least_capable(gpus := detection.detect_all()[:devices])
        _tell_of_unlike(gpus, device)
    precision = resolve_precision(trainer.precision, device)
    if warning := slow_four_bits(base.quantize_4bit, precision, device):
        log.warning(warning)
    if run.fsdp and devices * nodes == 1:
        raise UserError(
            "--fsdp: one process has nobody to share the base model with; start several with --multi-gpu, or leave it "
            "out"
        )
    attention = attention_for(base.attention, device.supports_flash, precision, isolate)
    kernels = "torch" if trainer.deterministic else base.kernels
    tf32 = run.tf32 and device.supports_tf32
    compiled = not run.fsdp and compiles(device, here=not card) if base.compile is None else base.compile
    if compiled:
        _check_graphs(base.compile_mode, trainer.accumulate_grad_batches, device)
        if base.compile_mode == GRAPHS and isolate and device.kind == "cuda":
            kernels = _kernels_in_graphs(kernels)
    alone = not card and devices * nodes == 1
    free = ram()[1] / GIB if device.kind == "cpu" else detection.free_gb() if alone else device.memory_gb
    return Machine(device, accelerator, precision, devices, nodes, attention, kernels, compiled, run.fsdp, tf32, free)


def gpus_of(asked: int | None, device: Device) -> int:
    """The number of GPUs that ``--gpus`` stands for. Raises UserError where there are fewer."""
    if asked is not None and device.kind == "cpu":
        raise UserError(
            f"--gpus {asked}: there is no GPU; leave it out, or name the card to plan for: granite-scu plan --hardware "
            f"gpu_a100_80 --gpus {asked}"
        )
    launched = launcher.launched_processes()
    if asked is not None and launched and launched[0] != asked:
        raise UserError(f"--gpus {asked}: {launched[0]} processes were started on this machine; give --multi-gpu alone")
    if asked is not None and asked > device.count:
        raise UserError(
            f"--gpus {asked}: {device.count} visible (CUDA_VISIBLE_DEVICES); give --gpus {device.count}, or plan for "
            "that many with granite-scu plan --hardware CARD"
        )
    return asked or device.count


def processes_for(multi_gpu: bool, kind: str, gpus: int) -> tuple[int, int]:
    """Processes on this node, and nodes. Raises UserError where a launcher, the GPUs and ``--multi-gpu`` disagree."""
    launched = launcher.launched_processes()
    _check_rank(multi_gpu, launched)
    if not multi_gpu:
        if launched and launched != (1, 1):
            raise UserError(
                f"{launched[0] * launched[1]} processes were started, and each would train alone into the same folder; "
                "add --multi-gpu, or start one process"
            )
        return 1, 1
    devices, nodes = launched or (gpus, 1)
    if not launched and (machines := launcher.number("SLURM_NNODES")) > 1:
        log.warning("--multi-gpu: of the job's %d machines only this one trains; put srun before the command", machines)
    if launcher.launcher() == "slurm" and "SLURM_NTASKS_PER_NODE" not in os.environ:  # Lightning refuses it, but late
        raise UserError(
            f"--multi-gpu: SLURM started {devices * nodes} tasks, and how many on each machine is left open; give it "
            f"--ntasks-per-node={devices} in place of --ntasks"
        )
    if kind == "cuda" and devices > gpus:
        raise UserError(
            f"--multi-gpu: {devices} processes were started on this machine, and each sees {gpus} of its GPUs; start "
            f"torchrun with --nproc-per-node {gpus}, or give SLURM --gpus-per-node={devices} and srun --gpu-bind=none"
        )
    if kind == "cpu" and devices * nodes == 1:
        raise UserError(
            "--multi-gpu: there is no GPU and only one CPU process; leave it out, or start several processes with "
            "torchrun --nproc-per-node 2 -m granite_scu train --multi-gpu --accelerator cpu"
        )
    return devices, nodes


def _check_rank(multi_gpu: bool, launched: tuple[int, int] | None) -> None:
    """Refuse a rank that an earlier launcher has left in the environment, or one that is not known here has set.

    Lightning takes a process with a rank above 0 for one that writes nothing, and with ``--multi-gpu`` one with
    LOCAL_RANK for a process that another has started: it waits for that one. Each pod of a Kubernetes job has RANK and
    WORLD_SIZE: each would train alone, into the same folder.
    """
    ranks, others = launcher.ranks(), launcher.number("WORLD_SIZE") > 1
    if multi_gpu and launched is None:
        is_lightnings = list(ranks)[:1] == ["LOCAL_RANK"] and "WORLD_SIZE" in os.environ
        wrong = not is_lightnings and ranks not in ({}, {"SLURM_PROCID": 0})  # a job's script, or its only task
    else:
        wrong = launcher.rank() >= math.prod(launched or (1,)) or (launched is None and "RANK" in ranks and others)
    if wrong:
        told = " ".join(f"{name}={rank}" for name, rank in ranks.items())
        raise UserError(
            f"{told}: is set as in one of several processes, and this one is alone; unset {' '.join(ranks)}, or start "
            "all processes with torchrun and --multi-gpu"
        )


def _tell_of_unlike(gpus: list[Device], least: Device) -> None:
    if len({(gpu.name, round(gpu.memory_gb)) for gpu in gpus}) > 1:
        cards = ", ".join(f"{gpu.name} with {gpu.memory_gb:.1f} GiB" for gpu in gpus)
        log.warning(
            "--multi-gpu: the GPUs differ (%s); precision is planned for %s and memory for %.1f GiB. "
            "CUDA_VISIBLE_DEVICES names those to use",
            *(cards, least.name, least.memory_gb),
        )


def _check_graphs(mode: str, accumulated: int, device: Device) -> None:
    # The second run of a CUDA graph overwrites the gradients that the first has left (pytorch/pytorch#169545).
    if mode == GRAPHS and accumulated != 1 and device.kind == "cuda":
        raise UserError(
            "--compile-mode reduce-overhead: its CUDA graphs cannot accumulate gradients; add "
            "--gradient-accumulation-steps 1, or leave it out"
        )


def _kernels_in_graphs(kernels: str) -> str:
    # fla-core's wait for the GPU to tell where documents begin, which nothing may while a graph is recorded.
    if kernels not in ("auto", "cuda") or find_spec("fla") is None:
        return kernels
    if kernels == "cuda":
        raise UserError(
            "--compile-mode reduce-overhead: its CUDA graphs cannot hold fla-core's kernels, which wait where "
            "documents begin; give --kernels torch, or another mode"
        )
    return "torch"


def compiles(device: Device, here: bool = True) -> bool:
    """Whether the layers are compiled where nothing else is asked for: on a GPU for which Triton has all it needs.

    A step there is bound by what moves through memory, and a compiled layer moves a third of it. On a CPU the layers
    are written for its cache already, and compiling them takes longer than it saves. What a GPU lacks is reported.
    """
    if device.capability is None:
        return False
    if not here:  # what is installed on its machine, nobody knows; a plan supposes that it is all there
        return device.capability >= TRITON_FROM
    lacking = _lacking_for_triton(device.capability)
    if lacking:
        log.warning("the decoder's layers are not compiled, and training is slower: %s", lacking)
    return not lacking


def _lacking_for_triton(capability: tuple[int, int]) -> str:
    """Why Triton cannot compile here, and what to do; empty where it can. It builds its launchers in C."""
    if capability < TRITON_FROM:
        return f"Triton wants a GPU of compute capability {'.'.join(map(str, TRITON_FROM))} or more"
    if find_spec("triton") is None:
        return f"Triton is not installed; pip install triton{'-windows' if sys.platform == 'win32' else ''}"
    if sys.platform == "win32":  # there the package brings compiler and headers
        return ""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler; install one (Debian: apt-get install gcc)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers are not installed (Debian: apt-get install python3-dev)"
    return ""


def attention_for(requested: str, supports_flash: bool, precision: str, isolate: bool = False) -> str:
    """The attention kernel that ``--attn`` stands for. Raises UserError where it cannot run."""
    usable = find_spec("flash_attn") is not None and supports_flash and precision != "32-true"
    if requested == "flash_attention_2" and not usable:
        raise UserError(
            "--attn flash_attention_2: needs flash-attn (pip install flash-attn --no-build-isolation), a GPU of "
            "compute capability 8.0 or more, and bf16 or fp16; use --attn sdpa"
        )
    return ("flash_attention_2" if usable and not isolate else "sdpa") if requested == "auto" else requested


def resolve_precision(requested: str | None, device: Device) -> str:
    """Lightning's precision for a run on ``device``.

    Args:
        requested: ``bf16-mixed``, ``16-mixed`` or ``32-true``; null or ``auto`` takes the fastest that is safe.
        device: what the run trains on.

    Raises:
        UserError: the device lacks what is asked for.
    """
    fitting = _fitting_precision(device)
    if requested is None or requested == "auto":
        return fitting
    flag = f"--precision {SHORT_PRECISIONS[requested]}"
    remedy = f"use --precision {SHORT_PRECISIONS[fitting]} or --precision auto"
    if requested == "bf16-mixed" and not device.supports_bf16:
        if device.kind == "cpu":
            raise UserError(f"{flag}: {device.name} has neither AMX nor AVX512-BF16, bf16 would be emulated; {remedy}")
        raise UserError(f"{flag}: {device.name} has compute capability {dotted(device.capability)}, not 8.0; {remedy}")
    if requested == "16-mixed" and device.kind != "cuda":
        raise UserError(f"{flag}: fp16 needs a CUDA device; {remedy}")
    return requested


def slow_four_bits(quantize_4bit: bool, precision: str, device: Device) -> str | None:
    """A warning in one line, where a GPU would multiply fp32 numbers made of 4-bit weights."""
    if not quantize_4bit or precision != "32-true" or device.kind != "cuda":
        return None
    fitting = SHORT_PRECISIONS[_fitting_precision(device)]
    if fitting == "fp32":
        return None
    return (
        f"--precision fp32: with --4bit-quantization every product is several times slower than in {fitting}, and the "
        f"weights are of 4 bits all the same; --precision {fitting} or auto is meant for it"
    )


def _fitting_precision(device: Device) -> str:
    if device.supports_bf16:
        return "bf16-mixed"
    volta_or_turing = device.capability is not None and device.capability >= (7, 0)
    return "16-mixed" if volta_or_turing else "32-true"  # before Volta, fp16 is slower than fp32


def resolve_accelerator(requested: str) -> Literal["cpu", "cuda"]:
    """Lightning's accelerator. A run without a GPU is refused unless the CPU is asked for.

    Args:
        requested: ``auto``, ``cpu``, ``cuda`` or ``gpu``.

    Raises:
        UserError: there is no CUDA device and the CPU was not asked for.
    """
    if requested == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    raise no_cuda(requested)


def set_tf32(on: bool) -> None:
    """Have PyTorch take fp32 products in TF32, which keeps ten bits of the mantissa, or in fp32."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


@contextmanager
def taking_tf32(on: bool) -> Iterator[None]:
    """``set_tf32``, for as long as the context lasts."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_tf32(on)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
