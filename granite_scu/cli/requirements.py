"""What a run needs and what it lacks: ``--check-requirements``.

``check_requirements`` looks at everything at once, without starting the run, and names what mends each lack.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from rich import box
from rich.table import Table
from rich.text import Text

from granite_scu.cli.console import make_console
from granite_scu.config.request import Request
from granite_scu.config.settings import DEFAULT_DATASET, HUB_PREFIX, TINY_MODEL, BaseConfig
from granite_scu.data.sources.read import is_path, readable_files
from granite_scu.errors import UserError
from granite_scu.hardware import GIB, Device, detect, dotted, nvml, presets, resolve_precision
from granite_scu.hardware.machine import Machine, resolve_request
from granite_scu.hardware.torch_build import install_command
from granite_scu.model import initial_adapter, loading
from granite_scu.model.loading import WEIGHT_DTYPES
from granite_scu.model.mamba2 import kernels
from granite_scu.training import memory_budget

_DATASET_FILE = f"{DEFAULT_DATASET.rpartition(':')[2]}/train-00000-of-00001.parquet"
"""Of the default data set: that it is cached shows that the data set is."""
_HUB_TIMEOUT = 2.0  # seconds
MEMORY = ("GPU memory", "CPU memory")
_PLACES = {
    "embedded": "part of granite-scu",
    "local folder": "read from disk",
    "in the hub cache": "read from disk",
    "on the hub": "is downloaded first",
}
"""Where a model may be, and what that means for the run."""
_ON_DISK = ("embedded", "local folder", "in the hub cache")
_DISK_NEEDED_GB = 1.0  # three checkpoints of the default adapter (18 M parameters, fp32, with Adam's moments)


AS_A_WHOLE = "the run as a whole"
"""The check of what no requirement says alone."""


@dataclass(frozen=True)
class Check:
    """One requirement, seen from the wanted run.

    Attributes:
        name: what was looked at.
        found: what is there.
        ok: whether that serves; null where it cannot be told or makes no difference.
        needed: whether the run fails without it.
        meaning: what it means for the run.
        remedy: what mends it, commands first; empty where nothing is to be done.
    """

    name: str
    found: str
    ok: bool | None
    needed: bool
    meaning: str
    remedy: str = ""

    @property
    def blocks(self) -> bool:
        """Whether the run cannot start because of this."""
        return self.needed and self.ok is False


def check_requirements(request: Request, preset: str | None = None) -> list[Check]:
    """Every requirement of a run. Loads no model; asks the hub only for what the run would download.

    Compiled kernels are tried out where they would be, as at the start of a run: that takes Triton a while.

    Args:
        request: the run.
        preset: ``--hardware``, also one that there is not.
    """
    base, trainer = request.base, request.trainer
    device = detect(trainer["accelerator"])
    needs_cuda = trainer["accelerator"] != "cpu"
    return [
        _check_python(),
        _check_pytorch(),
        _check_driver(needs_cuda),
        _check_cuda(needs_cuda),
        *([_check_preset(preset, device)] if preset else []),
        *([_check_multi_gpu(device)] if request.run.multi_gpu else []),
        _check_capability(device),
        _check_memory(device),
        _check_precision(trainer["precision"], device),
        *_check_number_formats(request.run.tf32, device),
        _check_bitsandbytes(base.quantize_4bit),
        _check_flash_attention(
            "sdpa" if request.data.isolate_documents and base.attention == "auto" else base.attention, device
        ),
        _check_mamba_kernels(base, trainer, device),
        _check_model(base.name),
        _check_disk(request.run.output_dir),
        _check_hub(base.name, request.data.path),
    ]


def with_the_run(checks: list[Check], request: Request) -> list[Check]:
    """The requirements, and what only all settings together can tell: whether they agree, and the memory they take.

    Args:
        checks: of ``check_requirements``.
        request: the run that was described.
    """
    try:
        machine = resolve_request(request)
        kernels.check(machine.kernels, machine.accelerator)
        checks = [_with_prediction(check, request, machine) if check.name in MEMORY else check for check in checks]
        _open_files(request)
    except UserError as error:
        if not can_start(checks):  # one of them says it
            return checks
        return [*checks, Check(AS_A_WHOLE, "is refused", False, True, "see below", str(error))]
    return checks


def _open_files(request: Request) -> None:
    """Refuse text or an adapter to start from that are not there. Raises UserError."""
    for source in request.data.sources:
        if is_path(source):
            readable_files(source)
    if request.lora.adapter and not request.run.resume:  # a checkpoint has what it needs of the adapter
        initial_adapter.check_control(request.control)
        initial_adapter.lora_of(request.lora, initial_adapter.open_start(request.lora.adapter, request.base.name))


def _with_prediction(check: Check, request: Request, machine: Machine) -> Check:
    name = request.base.name
    if name != BaseConfig.name and _model_place(name) not in _ON_DISK:
        return dataclasses.replace(check, meaning="not predicted before the model's configuration is downloaded")
    footprint = memory_budget.predict(request, machine)
    allowed = memory_budget.limit(machine.accelerator, machine.device.memory_gb, request.run.memory_fraction)
    meaning = f"the run is predicted to take {footprint.total / GIB:.2f} of {allowed / GIB:.2f} GiB"
    fits = footprint.total <= allowed
    if request.run.auto_batch_size:
        return dataclasses.replace(check, meaning=f"{meaning}; --auto-batch-size goes by that")
    return dataclasses.replace(
        check, ok=fits or None, meaning=meaning, remedy="" if fits else memory_budget.advice(request, machine)
    )


def can_start(checks: list[Check]) -> bool:
    """Whether nothing that the run needs is known to be missing."""
    return not any(check.blocks for check in checks)


def print_requirements(checks: list[Check], as_json: bool = False) -> None:
    """Print the checks to stdout: a table and the commands that mend what is missing, or one JSON object."""
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"can_start": can_start(checks), "checks": rows}, indent=2))
        return
    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("", "requirement", "found", "meaning"):
        table.add_column(header, overflow="fold")
    for check in checks:
        status, style = _status(check)
        cells = (check.name, check.found, check.meaning)
        table.add_row(Text(status, style=style), *(Text(cell) for cell in cells))
    console.print(table)
    for check in checks:
        if check.remedy:  # outside the table and unwrapped: commands are there to be copied
            console.print(Text(f"{check.name}: {check.remedy}"), soft_wrap=True)
    blocking = ", ".join(check.name for check in checks if check.blocks)
    verdict = f"This run cannot start: {blocking}." if blocking else "This run can start."
    console.print(Text(f"\n{verdict}", style="bold red" if blocking else "bold green"))


def _status(check: Check) -> tuple[str, str]:
    if check.blocks:
        return "missing", "bold red"
    if check.ok is None:
        return "-", "dim"
    return ("ok", "green") if check.ok else ("absent", "yellow")


def _check_python() -> Check:
    version = sys.version_info[:2]
    ok = None if version > (3, 13) else version >= (3, 10)
    meaning = "checked with 3.10 to 3.13" if ok is None else "supported: 3.10 to 3.13"
    return Check("Python", platform.python_version(), ok, True, meaning, "" if ok else "install Python 3.13")


def _check_pytorch() -> Check:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    ok = (major, minor) >= (2, 9)
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    found = f"{torch.__version__}, {build}"
    return Check("PyTorch", found, ok, True, "supported: 2.9 and newer", "" if ok else 'pip install "torch>=2.9"')


def _check_driver(needed: bool) -> Check:
    name, found = "NVIDIA driver", nvml.driver()
    meaning = "a GPU needs it" if needed else "not needed on the CPU"
    if found.version is None:
        # WSL and Jetson have devices without NVML, so that the device itself decides there.
        ok = None if torch.cuda.is_available() else False
        remedy = "restart the machine; if nvidia-smi fails still, install the driver anew"
        if found.problem is None:
            remedy = "sudo ubuntu-drivers install (elsewhere: https://www.nvidia.com/drivers), then restart"
        said = f"NVML fails: {found.problem}" if found.problem else "none found"
        return Check(name, said, ok, needed, meaning, remedy if needed and not ok else "")
    built_for = int((torch.version.cuda or "0").split(".")[0])
    ok = found.cuda_major >= built_for  # any minor version of the same major one is compatible
    remedy = "" if ok else f"update the driver, or {_install_torch('cu126')}"
    return Check(name, f"{found.version} (CUDA {found.cuda_major})", ok, needed, meaning, remedy)


def _check_cuda(needed: bool) -> Check:
    if torch.cuda.is_available():
        device = detect()
        meaning = "the run trains on it" if needed else "not used: --accelerator cpu"
        return Check("CUDA device", f"{device.count} x {device.name}", True, needed, meaning)
    meaning = "the run is refused" if needed else "the run trains on the CPU"
    found, remedy = nvml.why_no_cuda()
    return Check("CUDA device", f"none: {found}", False, needed, meaning, remedy if needed else "")


def _check_preset(name: str, device: Device) -> Check:
    title = "hardware preset"
    if name not in presets.PRESETS:
        known = ", ".join(presets.PRESETS)
        return Check(
            title, f"{name}: no such preset", False, True, "the run is refused", f"--hardware auto, or {known}"
        )
    warning = presets.mismatch(name, device)
    remedy = f"--hardware {presets.choose(device)}" if warning else ""
    return Check(title, name, warning is None, False, f"made for {presets.PRESETS[name].cards}", remedy)


def _check_multi_gpu(device: Device) -> Check:
    launched = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)
    if device.kind == "cuda":
        return Check("--multi-gpu", f"{device.count} visible", True, True, "one process for each GPU")
    found = f"a CPU, {launched} processes" if launched > 1 else "a CPU, one process"
    remedy = "" if launched > 1 else "leave out --multi-gpu, or start with torchrun --nproc-per-node 2"
    return Check("--multi-gpu", found, launched > 1, True, "on the CPU a launcher starts them", remedy)


def _check_capability(device: Device) -> Check:
    if device.capability is None:
        return Check("compute capability", "none: a CPU", None, False, "concerns GPUs only")
    built_in = _has_kernels(device.capability, torch.cuda.get_arch_list())
    found = dotted(device.capability)
    if built_in:
        return Check("compute capability", found, True, True, "this PyTorch has kernels for it")
    # CUDA 13 dropped what came before Turing, CUDA 12.6 knows nothing after Hopper.
    remedy = _install_torch("cu126" if device.capability < (7, 5) else "cu130")
    return Check("compute capability", found, False, True, "this PyTorch has no kernels for it", remedy)


def _has_kernels(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a build for ``architectures`` (sm_80, compute_120, sm_90a ...) runs on a GPU of this capability."""
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        if not number.isdigit():  # sm_90a and the like run on exactly that chip; a plain one always comes with them
            continue
        major, minor = divmod(int(number), 10)
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= capability:  # PTX, which the driver compiles
            return True
    return False


def _check_memory(device: Device) -> Check:
    name = MEMORY[0] if device.kind == "cuda" else MEMORY[1]
    return Check(name, f"{device.memory_gb:.1f} GiB", None, False, "if it runs out, lower --batch-size")


def _check_precision(requested: str | None, device: Device) -> Check:
    asked = requested or "auto"
    try:
        precision = resolve_precision(requested, device)
    except UserError as error:
        return Check("precision", asked, False, True, "the run is refused", str(error))
    return Check("precision", asked, True, True, f"the run trains in {precision}")


def _check_number_formats(take_tf32: bool, device: Device) -> list[Check]:
    bf16 = "mixed precision needs no loss scaling" if device.supports_bf16 else "refused when asked for"
    tf32 = "fp32 products of the model take it" if take_tf32 else "not used: --no-tf32"
    flash = "attention can take them" if device.supports_flash else "attention goes without"
    rows = (
        ("bf16", device.supports_bf16, bf16),
        ("TF32", device.supports_tf32, tf32 if device.supports_tf32 else "fp32 products in full precision"),
        ("flash kernels", device.supports_flash, flash),
    )
    return [Check(name, "yes" if has else "no", has, False, meaning) for name, has, meaning in rows]


def _check_bitsandbytes(needed: bool) -> Check:
    version = _version("bitsandbytes")
    meaning = "holds the base in 4 bits" if needed else "for --4bit-quantization only"
    remedy = "pip install bitsandbytes, or leave out --4bit-quantization" if needed and not version else ""
    return Check("bitsandbytes", version or "not installed", version is not None, needed, meaning, remedy)


def _check_flash_attention(attention: str, device: Device) -> Check:
    version = _version("flash-attn")
    usable = version is not None and device.supports_flash
    found = version or "not installed"
    if attention != "flash_attention_2":
        meaning = "taken by --attn auto" if attention == "auto" and usable else "not used: attention runs without"
        return Check("flash-attn", found, usable, False, meaning)
    if usable:
        return Check("flash-attn", found, True, True, "attention runs through it")
    install = "pip install flash-attn --no-build-isolation (needs nvcc), or " if device.supports_flash else ""
    meaning = "the run is refused" if device.supports_flash else "needs compute capability 8.0"
    return Check("flash-attn", found, False, True, meaning, f"{install}use --attn sdpa")


def _check_mamba_kernels(base: BaseConfig, trainer: Mapping[str, Any], device: Device) -> Check:
    name, needed = "Mamba-2 kernels", base.kernels == "cuda"
    installed = kernels.installed()
    found = ", ".join(f"{package} {version}" for package, version in installed.items()) or "not installed"
    in_the_way = {
        "--kernels torch": base.kernels == "torch",
        "--deterministic": bool(trainer["deterministic"]),
        "a CPU": device.kind == "cpu",
    }
    reason = next((reason for reason, holds in in_the_way.items() if holds), None)
    if reason and needed:
        return Check(name, found, False, True, f"the run is refused: {reason}", "use --kernels auto")
    if reason:
        return Check(name, found, None, False, f"not used, {reason}: the layers run in PyTorch")
    meaning = "the run is refused" if needed else "the layers run in PyTorch"
    if not installed:
        return Check(name, found, False, needed, meaning, kernels.INSTALL)
    sizes, dtype = _mamba_sizes(base.name), _dtype(trainer["precision"], device)
    if sizes is None or dtype is None:
        return Check(name, found, True, needed, "not tried here: no Mamba-2 layers of known sizes, or no precision")
    chosen, refused = kernels.first_right(torch.device(device.kind), dtype, sizes)
    said = "; ".join(refused)
    if chosen is kernels.TORCH:
        return Check(name, found, False, needed, f"{said}: {meaning}", "another version, or --kernels torch")
    passed = f"the layers run in {chosen.name}, which passed their self-check"
    return Check(name, found, True, needed, f"{passed}; {said}" if said else passed)


def _mamba_sizes(model: str) -> kernels.Sizes | None:
    """Those of the model's layers; None where it has none, or would have to be asked for."""
    try:
        if _model_place(model) in _ON_DISK:
            return kernels.Sizes.of_config(loading.load_model_config(model))
        return kernels.Sizes.of_config(loading.default_config()) if model == BaseConfig.name else None
    except UserError:  # the check of the model says so
        return None


def _dtype(precision: str | None, device: Device) -> torch.dtype | None:
    """What the layers' products are taken in; None where the check of the precision refuses it."""
    try:
        return WEIGHT_DTYPES[resolve_precision(precision, device)]
    except UserError:
        return None


def _check_model(name: str) -> Check:
    place = _model_place(name)
    if place in _PLACES:
        return Check("base model", f"{name} ({place})", True, True, _PLACES[place])
    remedy = f"--model {name}: give the folder of a model, owner/name on the hub, or {TINY_MODEL}"
    return Check("base model", place, False, True, "the run is refused", remedy)


def _model_place(name: str) -> str:
    if name == TINY_MODEL:
        return "embedded"
    if Path(name).is_dir():
        return "local folder" if (Path(name) / "config.json").is_file() else "a folder without config.json"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return "no such folder"
    weights = ("model.safetensors", "model.safetensors.index.json")
    cached = _is_cached(name, "config.json") and any(_is_cached(name, file) for file in weights)
    return "in the hub cache" if cached else "on the hub"


def _is_cached(repository: str, file: str, kind: str = "model") -> bool:
    # The answer is a path only for a file that is there; "known not to exist" is another object.
    return isinstance(try_to_load_from_cache(repository, file, repo_type=kind), str)


def _check_disk(output_dir: str) -> Check:
    folder = Path(output_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    name = "free disk"
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        remedy = f"--output-dir {output_dir}: choose a folder that can be written"
        return Check(name, f"{existing} cannot be written", False, True, "the run is refused", remedy)
    free = shutil.disk_usage(existing).free / GIB
    meaning = f"the run folder takes up to {_DISK_NEEDED_GB:g} GiB"
    remedy = f"--output-dir {output_dir}: make room there or choose another disk, or lower --keep"
    enough = free >= _DISK_NEEDED_GB
    return Check(name, f"{free:.1f} GiB free", enough, True, meaning, "" if enough else remedy)


def _check_hub(model_name: str, data_path: list[str] | str | None) -> Check:
    model = model_name if _model_place(model_name) == "on the hub" else None
    dataset = _dataset_to_load(data_path)
    downloads = " and ".join(name for name in (model, dataset) if name)
    if not downloads:
        return Check("hub access", "not asked", None, False, "this run downloads nothing")
    meaning = f"downloads {downloads}"
    local = f"--model {TINY_MODEL} and --data-dir stdlib-docs need no network"
    if constants.HF_HUB_OFFLINE:
        remedy = f"unset HF_HUB_OFFLINE; {local}"
        return Check("hub access", "switched off by HF_HUB_OFFLINE", False, True, meaning, remedy)
    api = HfApi()
    try:
        if model:
            api.model_info(model, timeout=_HUB_TIMEOUT)
        if dataset:
            api.dataset_info(dataset, timeout=_HUB_TIMEOUT)
    except RepositoryNotFoundError:
        remedy = f"check the name {downloads}; a private repository needs: hf auth login"
        return Check("hub access", "no such repository, or no right to it", False, True, meaning, remedy)
    except Exception as error:  # httpx's or httpx2's own, by the version of huggingface_hub
        found = f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
        remedy = f"curl -I {constants.ENDPOINT} (network, proxy, HF_ENDPOINT); {local}"
        return Check("hub access", found, False, True, meaning, remedy)
    return Check("hub access", f"{constants.ENDPOINT} answers", True, True, meaning)


def _dataset_to_load(path: list[str] | str | None) -> str | None:
    """The data set that the hub is asked for; of several the first."""
    sources = [DEFAULT_DATASET] if path is None else [path] if isinstance(path, str) else path
    named = next(
        (source.removeprefix(HUB_PREFIX).partition(":")[0] for source in sources if source.startswith(HUB_PREFIX)), None
    )
    return None if path is None and named and _is_cached(named, _DATASET_FILE, "dataset") else named


def _install_torch(build: str) -> str:
    return install_command(build, torch.__version__.split("+")[0])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
