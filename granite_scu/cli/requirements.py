"""What a run needs and what it lacks: ``--check-requirements``.

``check_requirements`` looks at everything at once, without starting the run. What the run itself would refuse is asked
of the run's own checks, whose refusal names what to do.
"""

import dataclasses
import json
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from rich import box
from rich.table import Table
from rich.text import Text
from transformers import PretrainedConfig

from granite_scu.cli.console import make_console
from granite_scu.cli.validate import check_what_is_there
from granite_scu.config.errors import UserError, attempt
from granite_scu.config.request import Request
from granite_scu.config.settings import DEFAULT_DATASET, HUB_PREFIX, SHORT_PRECISIONS, TINY_MODEL, BaseConfig, RunConfig
from granite_scu.hardware import machine, nvml, presets
from granite_scu.hardware.detection import GIB, Device, detect
from granite_scu.hardware.machine import resolve_precision
from granite_scu.hardware.nvml import dotted, install_command
from granite_scu.model import finding, loading
from granite_scu.model.flops import Size
from granite_scu.model.loading import WEIGHT_DTYPES
from granite_scu.model.mamba2 import kernels
from granite_scu.model.mamba2.packages import version_of
from granite_scu.model.mamba2.proof import Sizes
from granite_scu.storage.run_folder import RunFolder, nearest
from granite_scu.training import memory_budget
from granite_scu.training.base import open_base, size_of, with_start
from granite_scu.training.continuing import check_length
from granite_scu.training.early_checks import check_folder, check_loggers
from granite_scu.training.module import check_adapters
from granite_scu.training.resume import open_checkpoint, with_checkpoint_settings
from granite_scu.training.trainer import given_objects

_DATASET_FILE = f"{DEFAULT_DATASET.rpartition(':')[2]}/train-00000-of-00001.parquet"
"""Of the default data set: that it is cached shows that the data set is."""
_HUB_TIMEOUT = 2.0  # seconds
MEMORY = ("GPU memory", "CPU memory")
REFUSED = "the run is refused"
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

    @classmethod
    def of_run(cls, name: str, found: str, refusal: str, meaning: str) -> "Check":
        """What the run itself asks: its refusal says what to do. Otherwise ``meaning``."""
        return cls(name, found, not refusal, True, REFUSED if refusal else meaning, refusal)


def check_requirements(request: Request, preset: str | None = None) -> list[Check]:
    """Every requirement of a run. Loads no model; asks the hub only for what the run would download.

    Compiled kernels are tried out where they would be, as at the start of a run: that takes Triton a while.

    Args:
        request: the run.
        preset: ``--hardware``, also one that there is not.
    """
    base, trainer = request.base, request.trainer
    device = detect(trainer.accelerator)
    gpu, has_gpu = trainer.accelerator != "cpu", torch.cuda.is_available()
    no_gpu, get_gpu = ("", "") if has_gpu else nvml.why_no_cuda()
    get_gpu = get_gpu if gpu else ""
    runs_on = "the run trains on it" if has_gpu else REFUSED
    cpu = "not used: --accelerator cpu" if has_gpu else "the run trains on the CPU"
    built = f"{torch.__version__}, built {f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
    python = sys.version_info[:2]
    asked = SHORT_PRECISIONS.get(trainer.precision, trainer.precision or "auto")
    precision, refusal = attempt(resolve_precision, trainer.precision, device)
    trains = f"the run trains in {SHORT_PRECISIONS.get(precision)}"
    if not trainer.precision and device.kind == "cpu" and precision != "32-true":
        trains += ", or in fp32 where a step of the model is faster in it"
    checks = [
        # name, what is found, whether it serves, whether the run needs it, what that means, and what fixes it
        Check("Python", platform.python_version(), python >= (3, 10) if python <= (3, 13) else None, True,
              "checked with 3.10 to 3.13", "install Python 3.13"),
        Check("PyTorch", built, tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10), True,
              "supported: 2.10 and newer", 'pip install "torch>=2.10"'),
        _nvidia_driver(gpu, has_gpu, get_gpu),
        Check("CUDA device", f"{torch.cuda.device_count()} x {detect().name}" if has_gpu else f"none: {no_gpu}",
              has_gpu, gpu, runs_on if gpu else cpu, get_gpu),
        *([_preset(preset, device)] if preset else []),
        *([_processes(device, request.run.gpus)] if request.run.on_several else []),
        _capability(device.capability),
        Check(MEMORY[device.kind == "cpu"], f"{device.memory_gb:.1f} GiB", None, False,
              "if it runs out, lower --batch-size"),
        Check.of_run("precision", asked, refusal, trains),
        _bitsandbytes(base.quantize_4bit),
        _flash_attention(base.attention, base.name, request.data.isolate_documents, device, precision),
        _mamba_kernels(base.kernels, bool(trainer.deterministic), base.name, device.kind, precision),
        _model(base.name),
        _run_folder(request),
        *([_loggers(request.run)] if request.run.loggers else []),
        _disk(request),
        _hub(base.name, request.data.sources or [DEFAULT_DATASET]),
    ]  # fmt: skip
    return [dataclasses.replace(check, remedy="") if check.ok else check for check in checks]


def with_the_run(checks: list[Check], request: Request) -> list[Check]:
    """The requirements, and what only all settings together can tell: whether they agree, and the memory they take.

    Args:
        checks: of ``check_requirements``.
        request: the run that was described.
    """
    try:
        resolved = machine.resolve_request(request)
        kernels.check(resolved.kernels, resolved.accelerator)
        _open(request)
        checks = [_with_prediction(check, request, resolved) if check.name in MEMORY else check for check in checks]
    except UserError as error:
        if not can_start(checks):  # one of them says it
            return checks
        return [*checks, Check(AS_A_WHOLE, "is refused", False, True, "see below", str(error))]
    return checks


def _open(request: Request) -> None:
    """Refuse what a run would, once it opens what is named: text, callbacks, checkpoint, model. Raises UserError.

    A model that would be downloaded first is left alone.
    """
    check_what_is_there(request, writes=False)
    given_objects(request.trainer)
    resume = open_checkpoint(RunFolder(request.run.output_dir), request.run.resume)
    if _place(request.base.name) == "on the hub":
        with_start(request, resume)
        return
    if resume:
        request = with_checkpoint_settings(request, resume)
    request, base = open_base(request, resume, None)
    if resume:
        check_adapters(resume.state, base.size.trained)
        if (most := request.trainer.max_steps) > 0:
            check_length(resume, most, "--max-steps")


def _with_prediction(check: Check, request: Request, resolved: machine.Machine) -> Check:
    if _is_unknown(request.base.name):
        return dataclasses.replace(check, meaning="not predicted before the model's configuration is downloaded")
    request = memory_budget.with_checkpointing_settled(request, resolved)
    footprint = memory_budget.predict(request, resolved)
    allowed = resolved.memory_limit(request.run.memory_fraction)
    meaning = f"the run is predicted to take {footprint.total / GIB:.2f} of {allowed / GIB:.2f} GiB"
    fits = footprint.total <= allowed
    if footprint.step is None and fits:
        meaning = "the memory of this model's steps is not predicted"
    if request.run.auto_batch_size:
        return dataclasses.replace(check, meaning=f"{meaning}; --auto-batch-size goes by that")
    remedy = "" if fits else memory_budget.advice(request, resolved)
    return dataclasses.replace(check, ok=fits or None, meaning=meaning, remedy=remedy)


def can_start(checks: list[Check]) -> bool:
    """Whether nothing that the run needs is known to be missing."""
    return not any(check.blocks for check in checks)


def print_requirements(checks: list[Check], as_json: bool = False) -> None:
    """Print the checks to stdout: a table and the commands that install what is missing, or one JSON object."""
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"can_start": can_start(checks), "checks": rows}, indent=2))
        return
    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("", "requirement", "found", "meaning"):
        table.add_column(header, overflow="fold")
    words = {True: ("ok", "green"), False: ("absent", "yellow"), None: ("-", "dim")}
    for check in checks:
        status = ("missing", "bold red") if check.blocks else words[check.ok]
        table.add_row(Text(*status), *map(Text, (check.name, check.found, check.meaning)))
    console.print(table)
    for check in checks:
        if check.remedy:  # outside the table and unwrapped: commands are there to be copied
            console.print(Text(f"{check.name}: {check.remedy}"), soft_wrap=True)
    blocking = ", ".join(check.name for check in checks if check.blocks)
    verdict = f"This run cannot start: {blocking}." if blocking else "This run can start."
    console.print(Text(f"\n{verdict}", style="bold red" if blocking else "bold green"))


def _nvidia_driver(needed: bool, has_gpu: bool, remedy: str) -> Check:
    driver, means = nvml.driver(), "a GPU needs it" if needed else "not needed on the CPU"
    if driver.version:  # any minor version of the same major one is compatible
        built_for = int((torch.version.cuda or "0").split(".")[0])
        found, serves = f"{driver.version} (CUDA {driver.cuda_major})", driver.cuda_major >= built_for
        return Check("NVIDIA driver", found, serves, needed, means, remedy)
    # WSL and Jetson have devices without NVML, so that the device itself decides there.
    found = f"NVML fails: {driver.problem}" if driver.problem else "none found"
    return Check("NVIDIA driver", found, None if has_gpu else False, needed, means, remedy)


def _bitsandbytes(needed: bool) -> Check:
    version = version_of("bitsandbytes")
    means = "holds the base in 4 bits" if needed else "for --4bit-quantization only"
    remedy = "pip install bitsandbytes, or leave out --4bit-quantization" if needed else ""
    return Check("bitsandbytes", version or "not installed", bool(version), needed, means, remedy)


def _preset(name: str, device: Device) -> Check:
    _, unknown = attempt(presets.path, name)
    warning = unknown or presets.mismatch(name, device) or ""
    meaning = REFUSED if unknown else f"made for {presets.PRESETS[name].cards}"
    return Check("hardware preset", name, not warning, bool(unknown), meaning, warning)


def _processes(device: Device, gpus: int | None) -> Check:
    count, refusal = attempt(machine.gpus_of, gpus, device)
    processes, refusal = (None, refusal) if refusal else attempt(machine.processes_for, True, device.kind, count)
    found = f"{device.count} x {device.name}" + (f", {processes[0] * processes[1]} processes" if processes else "")
    meaning = "one process for each GPU; on the CPU a launcher starts them"
    return Check.of_run("--gpus" if gpus else "--multi-gpu", found, refusal, meaning)


def _capability(capability: tuple[int, int] | None) -> Check:
    if capability is None:
        return Check("compute capability", "none: a CPU", None, False, "concerns GPUs only")
    runs = _has_kernels(capability, torch.cuda.get_arch_list())
    meaning = f"this PyTorch has {'' if runs else 'no '}kernels for it"
    # CUDA 13 dropped what came before Turing, CUDA 12.6 knows nothing after Hopper.
    build = install_command("cu126" if capability < (7, 5) else "cu130", torch.__version__.split("+")[0])
    return Check("compute capability", dotted(capability), runs, True, meaning, build)


def _has_kernels(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a build for ``architectures`` (sm_80, compute_120, sm_90a ...) runs on a GPU of this capability."""
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        if number.isdigit():  # sm_90a and the like run on exactly that chip; a plain one always comes with them
            version = divmod(int(number), 10)
            # The driver compiles PTX (compute) for whatever came later; machine code (sm) serves one major version.
            if version <= capability and (kind == "compute" or version[0] == capability[0]):
                return True
    return False


def _flash_attention(asked: str, model: str, isolate: bool, device: Device, precision: str | None) -> Check:
    found, needed = version_of("flash-attn"), asked == "flash_attention_2"
    products = precision or resolve_precision(None, device)
    taken, refusal = attempt(machine.attention_for, asked, device.supports_flash, products, isolate)
    config, _ = attempt(_config_of, model)
    if config and not refusal:
        taken, refusal = attempt(loading.choose_attention, config, asked, taken)
    ok = not refusal if needed else found is not None and device.supports_flash
    meaning = REFUSED if refusal else f"attention runs in {taken}"
    return Check("flash-attn", found or "not installed", ok, needed, meaning, refusal)


def _mamba_kernels(asked: str, deterministic: bool, model: str, device: str, precision: str | None) -> Check:
    name, needed, ours = "Mamba-2 kernels", asked in ("cuda", "hub"), "the layers run in PyTorch"
    installed = kernels.installed(asked)
    found = ", ".join(f"{package} {version}" for package, version in installed.items()) or "not installed"
    taken = "torch" if deterministic else asked
    if refusal := attempt(kernels.check, taken, device)[1]:
        return Check.of_run(name, found, refusal, "")
    if taken == "torch" or device == "cpu":
        return Check(name, found, None, False, f"not used: {ours}")
    if not installed:
        return Check(name, found, False, False, ours, kernels.INSTALL)
    config, _ = attempt(_config_of, model)
    sizes = None if config is None else Sizes.of_config(config)
    if sizes is None or precision is None:
        return Check(name, found, True, needed, "not tried here: no Mamba-2 layers of known sizes, or no precision")
    chosen, wrong = kernels.first_correct(torch.device(device), WEIGHT_DTYPES[precision], sizes, asked)
    right = chosen is not kernels.TORCH
    meaning = (
        f"the layers run in {chosen.name}, which passed their self-check" if right else REFUSED if needed else ours
    )
    return Check(name, found, right, needed, "; ".join([*wrong, meaning]), "another version, or --kernels torch")


def _config_of(model: str) -> PretrainedConfig | None:
    """The model's configuration; None where the hub would have to be asked for it."""
    return None if _is_unknown(model) else loading.known_config(model)


def _is_unknown(model: str) -> bool:
    """Whether the hub would have to be asked for the model's configuration."""
    return model != BaseConfig.name and _place(model) == "on the hub"


def _model(name: str) -> Check:
    _, refusal = attempt(finding.resolve, name)
    if refusal:
        return Check.of_run("base model", name, refusal, "")
    if (place := _place(name)) == "on the hub":
        return Check.of_run("base model", f"{name} ({place})", "", "is downloaded first")
    return Check.of_run("base model", f"{name} ({place})", attempt(loading.meta_model, name)[1], "read from disk")


def _place(name: str) -> str:
    """Where a model that ``finding.resolve`` does not refuse is."""
    if (place := Path(finding.resolve(name))).is_dir():
        dequantised = place != Path(name).expanduser()
        return "embedded" if name == TINY_MODEL else "dequantised GGUF" if dequantised else "local folder"
    weights = ("model.safetensors", "model.safetensors.index.json")
    cached = _is_cached(name, "config.json") and any(_is_cached(name, file) for file in weights)
    return "in the hub cache" if cached else "on the hub"


def _is_cached(repository: str, file: str, kind: str = "model") -> bool:
    # The answer is a path only for a file that is there; "known not to exist" is another object.
    return isinstance(try_to_load_from_cache(repository, file, repo_type=kind), str)


def _loggers(run: RunConfig) -> Check:
    _, refusal = attempt(check_loggers, run.loggers, run.logger_offline)
    return Check.of_run("--logger", ", ".join(run.loggers), refusal, "they log beside TensorBoard and CSV")


def _run_folder(request: Request) -> Check:
    """Whether the run may have its folder, and the checkpoint that it is to continue from."""
    folder, run = RunFolder(request.run.output_dir), request.run
    is_new = not folder.path.exists()

    resume, refusal = attempt(open_checkpoint, folder, run.resume)
    refusal = refusal or attempt(check_folder, folder, request)[1]
    meaning = "is made" if is_new else "what a run has written there is deleted" if run.overwrite else "is free"
    if resume:
        meaning = f"the run continues from {resume.path.name}"
    return Check.of_run("run folder", str(folder.path), refusal, meaning)


def _disk(request: Request) -> Check:
    free = shutil.disk_usage(nearest(RunFolder(request.run.output_dir).path)).free / GIB
    remedy = f"--output-dir {request.run.output_dir}: make room there or choose another disk, or lower --keep"
    size, _ = attempt(_size, request)
    if size is None:
        return Check("free disk", f"{free:.1f} GiB free", None, True, "what the run folder takes is not known")
    # In fp32: each checkpoint has Adam's moments too, and one is written before the oldest goes; the best adapter and
    # the last have none.
    needed = 4 * size.trained * (3 * (request.run.keep + 1) + 2) / GIB
    meaning = f"the run folder takes up to {needed:.2g} GiB"
    return Check("free disk", f"{free:.1f} GiB free", free >= needed, True, meaning, remedy)


def _size(request: Request) -> Size | None:
    """Of the model with its adapters; None where the hub would have to be asked."""
    return None if _is_unknown(request.base.name) else size_of(*with_start(request, None))


def _hub(model: str, sources: list[str]) -> Check:
    """Whether the hub has what is downloaded: the model, and the first data set that is named."""
    name, api = "hub access", HfApi()
    sets = [source.removeprefix(HUB_PREFIX).partition(":")[0] for source in sources if source.startswith(HUB_PREFIX)]
    if sources == [DEFAULT_DATASET] and _is_cached(sets[0], _DATASET_FILE, "dataset"):
        sets = []
    from_hub = not attempt(finding.resolve, model)[1] and _place(model) == "on the hub"
    asked = [(model, api.model_info)] if from_hub else []
    asked += [(sets[0], api.dataset_info)] if sets else []
    if not asked:
        return Check(name, "not asked", None, False, "this run downloads nothing")
    downloads = " and ".join(repository for repository, _ in asked)
    meaning = f"downloads {downloads}"
    local = f"--model {TINY_MODEL} and --data-dir stdlib-docs need no network"
    if constants.HF_HUB_OFFLINE:
        return Check(name, "switched off by HF_HUB_OFFLINE", False, True, meaning, f"unset HF_HUB_OFFLINE; {local}")
    try:
        for repository, ask in asked:
            ask(repository, timeout=_HUB_TIMEOUT)
    except (RepositoryNotFoundError, HFValidationError):
        remedy = f"check the name {downloads}; a private repository needs: hf auth login"
        return Check(name, "no such repository, or no right to it", False, True, meaning, remedy)
    except Exception as error:  # httpx's or httpx2's own, by the version of huggingface_hub
        found = f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
        remedy = f"curl -I {constants.ENDPOINT} (network, proxy, HF_ENDPOINT); {local}"
        return Check(name, found, False, True, meaning, remedy)
    return Check(name, f"{constants.ENDPOINT} answers", True, True, meaning)
