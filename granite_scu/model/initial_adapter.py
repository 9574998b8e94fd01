"""Where training starts from: an adapter that is there already, instead of a new one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from granite_scu.config.errors import UserError
from granite_scu.config.settings import LoraConfig, listed
from granite_scu.control.diagnostics.ceiling import Matrix
from granite_scu.model import adapter_files, saved_adapter
from granite_scu.model.description_length import by_expert

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

    adapter: saved_adapter.SavedAdapter
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


def open_start(path: str, base_name: str) -> InitialAdapter:
    """The adapter in a folder, proved to fit the base without loading that.

    Raises:
        UserError: there is none, it is not plain LoRA, or it is for another base.
    """
    adapter = saved_adapter.find(path, f"--adapter {path}")
    saved_adapter.base_of(adapter, base_name)
    with adapter.open() as file:
        matrices = tuple(
            matrix
            for update in adapter.updates(base_name).values()
            for matrix in _measured(*map(file.get_tensor, update.factors), update)
        )
    if not all(m.a_norm < float("inf") and m.b_norm < float("inf") for m in matrices):
        raise UserError(f"--adapter {path}: its weights are not finite; choose another")
    return InitialAdapter(adapter, _name(path), adapter.sha256, matrices)


def from_checkpoint(folder: Path, path: str, base_name: str, frozen: Mapping[str, Any]) -> InitialAdapter:
    """What a run started from whose adapter is not there any more: its checkpoint holds the factors of then and now.

    Args:
        folder: the checkpoint.
        path: where the adapter was.
        base_name: of the base model.
        frozen: what the checkpoint says of the run that it is of.

    Raises:
        UserError: as of ``open_start``.
    """
    start = open_start(str(folder), base_name)
    return replace(start, name=_name(path), sha256=str(frozen.get(SHA256)))


def _name(path: str) -> str:
    return adapter_files.short_name(Path(path).expanduser().resolve())


def _measured(a: Tensor, b: Tensor, update: saved_adapter.StoredUpdate) -> Iterator[Matrix]:
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
    targets = has.target_modules if isinstance(has.target_modules, str) else sorted(has.target_modules)
    asked = None if config.targets is None else sorted(listed(config.targets))
    on_experts, stabilised = bool(has.target_parameters), bool(has.use_rslora)
    for flag, wanted, found in (
        ("--lora-r", config.rank, has.r),
        ("--lora-alpha", config.alpha, has.lora_alpha),
        ("--lora-targets", asked, targets),
    ):
        if wanted is not None and wanted != found:
            raise UserError(
                f"{flag} {_describe(wanted)}: the adapter to start from, --adapter {start.adapter.folder}, has "
                f"{_describe(found)}; leave {flag} out"
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
    return replace(config, **own, targets=listed(targets))


def _describe(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
