"""The files of a LoRA adapter, as PEFT saves it: where they are and whether they are sound, without loading a model."""

import filecmp
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from granite_scu.config.errors import UserError
from granite_scu.config.settings import is_local
from granite_scu.storage.run_folder import (
    ADAPTER_CONFIG,
    BEST_ADAPTER,
    LAST_ADAPTER,
    TRAINING_CONFIG,
    WEIGHTS,
    RunFolder,
)

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_PLAIN = re.compile(r"[\w.^$\\-]+")
MAX_RANK = 65_536
_MAX_NAMES = 20_000
"""Of layers; PEFT compares each with each layer."""


def factor_names(layer: str) -> tuple[str, str]:
    """The names of A, (rank, in), and B, (out, rank), in an adapter's file; of a stack see ``LowRankUpdate``."""
    return f"base_model.model.{layer}.lora_A.weight", f"base_model.model.{layer}.lora_B.weight"


def require_adapter(folder: Path, label: str) -> None:
    """Refuse what is no folder, or one without an adapter in safetensors. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{label}: no such folder; name a run folder, its final/ or one of its checkpoints")
    require_files(folder, label)


def require_files(folder: Path, label: str) -> None:
    """Refuse a folder without an adapter in safetensors.

    Raises:
        UserError: it holds none; says which ones a run kept that was cut off.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        parts = (folder / BEST_ADAPTER, *RunFolder(folder).checkpoints())
        kept = [part.name for part in parts if (part / ADAPTER_CONFIG).is_file()]
        if (folder / TRAINING_CONFIG).is_file() and kept:
            raise UserError(
                f"{label}: this run has not ended, and has saved no adapter yet; name one that it kept: "
                + ", ".join(str(folder / name) for name in kept)
            )
        if (folder / "config.json").is_file():
            raise UserError(f"{label}: is a whole model, no adapter; train on it by --model, or score it by eval")
        raise UserError(f"{label}: is not a run folder, and holds no adapter ({ADAPTER_CONFIG} is missing)")
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        reason = "its adapter is a pickle, which may run code when it is loaded" if pickled else f"{WEIGHTS} is missing"
        raise UserError(f"{label}: {reason}; only safetensors are read")


def run_of(folder: Path) -> Path | None:
    """The run folder that an adapter belongs to: its own, or the one above ``final/``, ``best/`` and checkpoints."""
    resolved = folder.resolve()  # "." and a link have other names than the folder
    places = (folder, *([resolved.parent] if _is_part(resolved) else []))
    return next((place for place in places if (place / TRAINING_CONFIG).is_file()), None)


def short_name(folder: Path) -> str:
    """The last part of a path, and where it is a part of a run, the run before it."""
    return f"{folder.parent.name}/{folder.name}" if _is_part(folder) else folder.name


def _is_part(folder: Path) -> bool:
    return folder.name in (BEST_ADAPTER, LAST_ADAPTER) or folder.name.startswith("checkpoint-")


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _are_layers(value: Any) -> bool:
    """Numbers of layers, or one."""
    numbers = value if isinstance(value, list) else [value]
    return all(type(number) is int and 0 <= number <= MAX_RANK for number in numbers)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e15


def _are_names(value: Any) -> bool:
    """Names, or patterns without a repetition: those of a stranger could take for ever to match."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_NAMES
        and all(isinstance(name, str) and _PLAIN.fullmatch(name) for name in value)
    )


def _is_table(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and _are_names([*value]) and all(map(of, value.values()))


_SCHEMA: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_count, f"must be a rank, from 1 to {MAX_RANK:,}"),
    "lora_alpha": (_is_number, "must be a finite number"),
    "lora_dropout": (_is_number, "must be a finite number"),
    "target_modules": (lambda value: isinstance(value, str) or _are_names(value), "must be a list of layers' names"),
    "target_parameters": (_are_names, "must be a list of parameters' names"),
    "exclude_modules": (_are_names, "must be a list of layers' names"),
    "layers_pattern": (lambda value: _are_names([value] if isinstance(value, str) else value), "must be layers' names"),
    "layers_to_transform": (_are_layers, "must be numbers of layers"),
    "rank_pattern": (lambda value: _is_table(value, _is_count), "must be ranks by layers' names"),
    "alpha_pattern": (lambda value: _is_table(value, _is_number), "must be numbers by layers' names"),
    "base_model_name_or_path": (lambda value: isinstance(value, str), "must be a name"),
    "peft_type": (lambda value: isinstance(value, str), "must be a name"),
}
"""What the settings of an adapter may be; null where there is none."""

_NEVER_NULL = ("rank_pattern", "alpha_pattern")
"""What PEFT looks into wherever it is there."""


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse the configuration of an adapter that would be dear, or end in a raw error, where it is used.

    Raises:
        ValueError: names the setting.
    """
    for name, (is_valid, words) in _SCHEMA.items():
        value = config.get(name)
        is_absent = value is None and (name != "r" or config.get("peft_type") not in (None, "LORA"))
        is_absent &= name not in _NEVER_NULL or name not in config
        if not (is_absent or is_valid(value)):
            raise ValueError(f"{ADAPTER_CONFIG}: {name} {words}, and is {str(value)[:60]}")


def modules_of(names: Iterable[str]) -> list[str]:
    """The layers that an adapter's file has factors of, from the names of its tensors."""
    return sorted({match["module"] for name in names if (match := _NAME.fullmatch(name))})


def check_adapter(weights: bytes, config: Mapping[str, Any]) -> dict[str, int]:
    """Refuse an adapter that is damaged, not finite, untrained, or not what its configuration says.

    Args:
        weights: ``adapter_model.safetensors``.
        config: ``adapter_config.json``.

    Returns:
        The counts ``layers`` and ``parameters``.

    Raises:
        ValueError: says what is wrong; begins with the name of the file.
    """
    import safetensors.torch  # late: it takes seconds, and who names no adapter is told without it

    try:
        tensors = safetensors.torch.load(weights)
    except (SafetensorError, KeyError) as error:  # it knows no number of 4 bits
        raise ValueError(f"{WEIGHTS}: not a whole safetensors file of plain numbers ({error})") from error
    if config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise ValueError(f"{ADAPTER_CONFIG}: does not describe a LoRA adapter (peft_type LORA with a rank r)")
    check_config(config)
    if not tensors:
        raise ValueError(f"{WEIGHTS}: holds no tensor")
    factors: dict[str, dict[str, Tensor]] = {}
    for name, values in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or not (
            _is_target(match["module"], config.get("target_modules")) or is_of_experts(match["module"], config)
        ):
            raise ValueError(f"{WEIGHTS}: {name} is not a factor of a layer that {ADAPTER_CONFIG} names")
        check_numbers(name, values)
        factors.setdefault(match["module"], {})[match["factor"]] = values
    for module, pair in factors.items():
        rank, shapes = _rank_of(module, config), {factor: list(values.shape) for factor, values in pair.items()}
        if missing := {"A", "B"} - set(pair):
            raise ValueError(f"{WEIGHTS}: {module} lacks lora_{missing.pop()}")
        stacked, flat = is_of_experts(module, config), [len(shape) for shape in shapes.values()] == [2, 2]
        ranks = {shapes["A"][0], shapes["B"][1]} if flat else set()
        if not (len(ranks) == 1 and min(ranks) % rank == 0 if stacked else ranks == {rank}):
            expected = (
                f"[n {rank}, in] and [out, n {rank}] of n experts" if stacked else f"[{rank}, in] and [out, {rank}]"
            )
            raise ValueError(
                f"{WEIGHTS}: {module} has lora_A {shapes['A']} and lora_B {shapes['B']}; "
                f"{ADAPTER_CONFIG} says rank {rank}, so {expected}"
            )
    if not any(pair["B"].any() for pair in factors.values()):
        raise ValueError(f"{WEIGHTS}: every lora_B is zero, so the adapter changes nothing; train first")
    return {"layers": len(factors), "parameters": sum(v.numel() for pair in factors.values() for v in pair.values())}


def check_numbers(name: str, factor: "Tensor") -> None:
    """Refuse a factor with which a model would say nothing, or something that nobody has trained. Raises ValueError."""
    if not factor.is_floating_point() or factor.itemsize < 2:  # PyTorch does not compute with fewer than 16 bits
        raise ValueError(
            f"{WEIGHTS}: {name} holds {factor.dtype}, no floating point of 16 bits or more; choose another"
        )
    if not bool(factor.isfinite().all()):
        raise ValueError(f"{WEIGHTS}: {name} is not finite, so that its run diverged; choose another")


def _is_target(module: str, targets: str | Iterable[str] | None) -> bool:
    """PEFT's rule for a list, which has ends of names. A text is a pattern, and the file itself has the names."""
    return isinstance(targets, str) or any(
        module == target or module.endswith(f".{target}") for target in targets or ()
    )


def is_of_experts(module: str, config: Mapping[str, Any]) -> bool:
    """Whether a layer holds a stack of experts that the configuration names. Of several, PEFT puts each into the last
    one as its ``base_layer``."""
    layer = ".".join(part for part in module.split(".") if part != "base_layer")
    return _is_target(layer, [name.rpartition(".")[0] for name in config.get("target_parameters") or ()])


def _rank_of(module: str, config: Mapping[str, Any]) -> int:
    """PEFT's rule: the first pattern that the end of the name matches, else ``r``."""
    patterns = config.get("rank_pattern") or {}
    found = (rank for pattern, rank in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, config["r"])


def may_be_same(one: str, other: str) -> bool:
    """Whether two names of base models can mean one: a folder may hold what a hub id names, or have been moved.

    Two folders that are both there are told apart by their weights.
    """
    if one == other:
        return True
    folders = [Path(name).expanduser() for name in (one, other) if is_local(name)]
    if len(folders) == 2 and all(folder.is_dir() for folder in folders):
        weights = {path.name for folder in folders for path in folder.glob("*.safetensors")}
        _, different, missing = filecmp.cmpfiles(*folders, weights, shallow=False)
        return not different and not missing
    return bool(folders)
