"""An adapter on disk: where it lies, what made it, whether it is one that granite-scu can continue from, and as where
training starts from."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors import SafetensorError, safe_open
from torch import Tensor

from granite_scu.config.errors import UserError
from granite_scu.config.settings import BaseConfig, LoraConfig, from_record, listed
from granite_scu.config.untrusted_input import only_files
from granite_scu.control.diagnostics.ceiling import Matrix
from granite_scu.model import adapter_files, experts, loading
from granite_scu.model.adapters import ADAPTER, linear_layers, read_config
from granite_scu.model.description_length import by_expert
from granite_scu.storage import manifest
from granite_scu.storage.run_folder import ADAPTER_CONFIG, TRAINING_CONFIG, WEIGHTS, read_json, unreadable
from granite_scu.storage.working_folder import found_from_here

_HARMLESS = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "revision", "task_type", "peft_type", "peft_version", "auto_mapping"),
    *("inference_mode", "init_lora_weights"),
}
"""Settings of PEFT that leave an adapter a sum of products B A on linear layers and experts, whatever they say."""

_FRESH = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base model as it is. PiSSA, OLoRA, CorDA and LoftQ change it."""


@dataclass(frozen=True)
class StoredUpdate:
    """The update of one layer in an adapter's file.

    Attributes:
        weight: full name of the parameter that it is added to, in the base model.
        factors: names of A and B in the file.
        scale: alpha / rank, or alpha / sqrt(rank) of rank-stabilised adapters.
        experts: as of ``LowRankUpdate``.
    """

    weight: str
    factors: tuple[str, str]
    scale: float
    experts: int = 0


@dataclass(frozen=True)
class SavedAdapter:
    """A LoRA adapter in a folder: a run's final one, its best, one of a checkpoint, or any that PEFT has saved.

    Attributes:
        folder: holds ``adapter_model.safetensors`` and ``adapter_config.json``.
        config: PEFT's.
        training: ``training_config.json`` of the run that it is of; empty for an adapter from elsewhere.
        label: what errors name it by.
    """

    folder: Path
    config: peft.LoraConfig
    training: dict[str, Any]
    label: str

    @cached_property
    def sha256(self) -> str:
        """Of the weights."""
        return manifest.sha256(self.folder / WEIGHTS)

    @property
    def tokenizer_places(self) -> tuple[Path, ...]:
        """Where a tokenizer may have been saved with it: its own folder, and that of its run."""
        return tuple(filter(None, (self.folder, adapter_files.run_of(self.folder))))

    @property
    def base(self) -> BaseConfig:
        """The base model that it was trained on, as its training had it, but in PyTorch's kernels: others would first
        have to be proved right, in a process of their own."""
        named = {"name": self.config.base_model_name_or_path} | self.training.get("base", {})
        if (run := adapter_files.run_of(self.folder)) and named["name"]:
            named["name"] = found_from_here(named["name"], run)
        return from_record(BaseConfig, named, compile=False, kernels="torch")

    @property
    def precision(self) -> str | None:
        """Lightning's name of the precision that it was trained in; None where that is not known."""
        return self.training.get("machine", {}).get("precision")

    def updates(self, base_name: str) -> dict[str, StoredUpdate]:
        """The layers of the base that the adapter is on, proved to fit without loading the base.

        PEFT itself is asked, on a model without memory: it resolves patterns of names, ranks and scales.

        Returns:
            the updates, by the names that ``low_rank_updates`` has.

        Raises:
            UserError: the adapter is for another base, sits on something other than a linear layer or experts, or
                holds what is no finite number.
        """
        stored = {}
        with self.open() as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                factor = file.get_tensor(name)
                try:
                    adapter_files.check_numbers(name, factor)
                except ValueError as error:
                    raise UserError(f"{self.label}: {error}") from error
                stored[name] = tuple(factor.shape)
        config = copy.copy(self.config)
        model = loading.meta_model(base_name)
        allowed = {*linear_layers(model), *experts.stacks(model)}
        try:
            peft.inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
        except ValueError as error:
            raise self._misfit(base_name, "none of its layers has the names that the adapter wants") from error
        found, expected = {}, {}
        for path, module in model.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            stacked = isinstance(module, ParamWrapper)
            name = experts.name_of(path, module) if stacked else path
            if name not in allowed:
                raise UserError(
                    f"{self.label}: adapts {name}, and only experts and linear layers other than the output head are "
                    "supported"
                )
            for factor, linear in zip(adapter_files.factor_names(path), (module.lora_A, module.lora_B), strict=True):
                expected[factor] = tuple(linear[ADAPTER].weight.shape)
            weight, count = (name, module.num_experts) if stacked else (f"{name}.weight", 0)
            found[name] = StoredUpdate(weight, adapter_files.factor_names(path), float(module.scaling[ADAPTER]), count)
        for name in sorted(expected.keys() | stored.keys()):
            if expected.get(name) != stored.get(name):
                wants, has = (_describe(shapes.get(name)) for shapes in (expected, stored))
                raise self._misfit(base_name, f"{name} would have to be {wants} and is {has}")
        return found

    def open(self) -> Any:
        """The weights, to be read one by one; a context.

        Raises:
            UserError: the file is damaged.
        """
        try:
            return safe_open(self.folder / WEIGHTS, "pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.label}: {WEIGHTS} is damaged ({error})") from error

    def _misfit(self, base_name: str, reason: str) -> UserError:
        return UserError(
            f"{self.label}: its adapter does not fit {base_name}: {reason}; it was trained on "
            f"{self.config.base_model_name_or_path}"
        )


def find(path: str | Path, label: str | None = None) -> SavedAdapter:
    """The adapter in a folder, and the run that it is of where the folder, or the one above it, is a run folder.

    Args:
        path: run folder, its ``final/``, a checkpoint of it, or a folder that PEFT has saved.
        label: what errors name it by; the path where that says enough.

    Raises:
        UserError: no adapter there, not a LoRA adapter, or one with something that is not supported.
    """
    folder, label = Path(path).expanduser(), label or str(path)
    only_files(folder)
    adapter_files.require_adapter(folder, label)
    for name in (ADAPTER_CONFIG, WEIGHTS):  # the libraries would say that it is not there
        try:
            (folder / name).open("rb").close()
        except OSError as error:
            raise unreadable(folder / name, error) from error
    config, run = _plain_lora(folder, label), adapter_files.run_of(folder)
    training = read_json(run / TRAINING_CONFIG) if run else {}
    named, trained_on = config.base_model_name_or_path, training.get("base", {}).get("name")
    if named and trained_on and not adapter_files.may_be_same(named, trained_on):
        raise UserError(
            f"{label}: {ADAPTER_CONFIG} names the base model {named}, and {TRAINING_CONFIG} says that the run trained "
            f"on {trained_on}; one of the files is of another run"
        )
    return SavedAdapter(folder, config, training, label)


def base_of(adapter: SavedAdapter, name: str | None) -> BaseConfig:
    """The base model of an adapter: the one that it was trained on, or that which the user names.

    Another one is refused where both have names that everyone knows them by. A local folder may hold a copy of either;
    whether the adapter fits is seen from the shapes.

    Raises:
        UserError: another one, or it is not known.
    """
    trained_on = adapter.config.base_model_name_or_path
    if name is None and not trained_on:
        raise UserError(f"{adapter.label}: {ADAPTER_CONFIG} names no base model; give it by --model")
    if name is None:
        return adapter.base
    if trained_on and not adapter_files.may_be_same(adapter.base.name, name):
        raise UserError(f"{adapter.label}: was trained on {trained_on}, and not on --model {name}")
    return replace(adapter.base, name=name)


def _plain_lora(folder: Path, label: str) -> peft.LoraConfig:
    try:
        config = read_config(folder)
    except SafetensorError as error:
        raise UserError(f"{label}: {WEIGHTS} is damaged ({error})") from error
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
        raise UserError(f"{label}: {ADAPTER_CONFIG} is damaged, or of a newer PEFT ({error})") from error
    if not isinstance(config, peft.LoraConfig):
        raise UserError(f"{label}: is a {config.peft_type} adapter; only LoRA is supported")
    usual = peft.LoraConfig()
    unusual = [
        f"{field.name} = {getattr(config, field.name)!r}"
        for field in fields(config)
        if field.name not in _HARMLESS and (getattr(config, field.name) or None) != (getattr(usual, field.name) or None)
    ]
    if config.init_lora_weights not in _FRESH:
        unusual.append(f"init_lora_weights = {config.init_lora_weights!r}, which changes the base model")
    if unusual:
        raise UserError(
            f"{label}: only plain LoRA is supported, whose update is (alpha/r) B A; {ADAPTER_CONFIG} has "
            f"{'; '.join(unusual)}"
        )
    return config


def _describe(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else " x ".join(map(str, shape))


SHA256 = "--adapter (SHA-256)"
"""What a checkpoint names the adapter by that its run started from."""


@dataclass(frozen=True)
class InitialAdapter:
    """The adapter that a run starts from.

    Attributes:
        adapter: where its factors are read.
        name: what it is called in the record: the last part of its path, and the run of a best one or a checkpoint.
        sha256: of the weights that the run started from, also where it continues from a checkpoint of its own.
        matrices: its sizes, for the ceiling on S.
    """

    adapter: SavedAdapter
    name: str
    sha256: str
    matrices: tuple[Matrix, ...]

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(out, in, rank) of each adapted matrix."""
        return [(m.out, m.inner, m.rank) for m in self.matrices]

    def mismatch(self, quantize_4bit: bool) -> str | None:
        """What to know where the base was held otherwise when the adapter was trained; None where that is not so."""
        then = self.adapter.training.get("base", {}).get("quantize_4bit")
        if then is None or then == quantize_4bit:
            return None
        held, flag = ("in 4 bits", "--4bit-quantization") if then else ("whole", "--no-4bit-quantization")
        return (
            f"--adapter {self.name}: learned on a base that was held {held}, which this run's is not, so it starts "
            f"a little worse than it ended; {flag} holds the base as then"
        )

    def record(self) -> dict[str, str]:
        """Where it came from, for the run folder."""
        return {"adapter": self.name, "sha256": self.sha256}


def open_initial_adapter(path: str, base_name: str) -> InitialAdapter:
    """The adapter in a folder, proved to fit the base without loading that.

    Raises:
        UserError: there is none, it is not plain LoRA, or it is for another base.
    """
    adapter = find(path, f"--adapter {path}")
    base_of(adapter, base_name)
    with adapter.open() as file:
        matrices = tuple(
            matrix
            for update in adapter.updates(base_name).values()
            for matrix in _measured(*map(file.get_tensor, update.factors), update)
        )
    return InitialAdapter(adapter, _name(path), adapter.sha256, matrices)


def from_checkpoint(folder: Path, path: str, base_name: str, frozen: Mapping[str, Any]) -> InitialAdapter:
    """What a run started from whose adapter is not there any more: its checkpoint holds the factors of then and now.

    Args:
        folder: the checkpoint.
        path: where the adapter was.
        base_name: of the base model.
        frozen: what the checkpoint says of the run that it is of.

    Raises:
        UserError: as of ``open_initial_adapter``.
    """
    start = open_initial_adapter(str(folder), base_name)
    return replace(start, name=_name(path), sha256=str(frozen.get(SHA256)))


def _name(path: str) -> str:
    return adapter_files.short_name(Path(path).expanduser().resolve())


def _measured(a: Tensor, b: Tensor, update: StoredUpdate) -> Iterator[Matrix]:
    """The matrix of an update; of a stack, each expert's."""
    pairs = zip(*by_expert(a, b, update.experts or 1), strict=True)
    for a_, b_ in pairs:
        norms = float(a_.float().norm()), float(b_.float().norm())
        yield Matrix(len(b_), a_.shape[1], len(a_), *norms, update.scale)


def lora_of(config: LoraConfig, start: InitialAdapter) -> LoraConfig:
    """The configuration with what the adapter decides.

    Raises:
        UserError: something was asked for that the adapter has otherwise.
    """
    has = start.adapter.config
    targets = has.target_modules if isinstance(has.target_modules, str) else sorted(has.target_modules or ())
    asked = None if config.targets is None else sorted(listed(config.targets))
    on_experts, stabilised = bool(has.target_parameters), bool(has.use_rslora)
    for flag, wanted, found in (
        ("--lora-r", config.rank, has.r),
        ("--lora-alpha", config.alpha, has.lora_alpha),
        ("--lora-targets", asked, targets),
    ):
        if wanted is not None and wanted != found:
            raise UserError(
                f"{flag} {_in_words(wanted)}: the adapter to start from, --adapter {start.adapter.folder}, has "
                f"{_in_words(found)}; leave {flag} out"
            )
    for flag, wanted, found in (
        ("--lora-experts", config.experts, on_experts),
        ("--rslora", config.rslora, stabilised),
    ):
        if wanted and not found:
            raise UserError(
                f"{flag}: the adapter to start from, --adapter {start.adapter.folder}, has none of it; leave {flag} out"
            )
    if config.dropout and on_experts:
        raise UserError(
            f"--lora-dropout {config.dropout:g}: the adapter to start from, --adapter {start.adapter.folder}, is on "
            "experts too, and adapters of experts have no dropout; leave --lora-dropout out"
        )
    own = {"rank": has.r, "alpha": float(has.lora_alpha), "rslora": stabilised, "experts": on_experts}
    return replace(config, **own, targets=listed(targets) or None)  # of experts alone PEFT names none


def _in_words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
