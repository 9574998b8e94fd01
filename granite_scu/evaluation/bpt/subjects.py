"""What the user named: run folders, adapters, checkpoints and whole models, and the base that they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from granite_scu.config.errors import UserError
from granite_scu.config.settings import is_local
from granite_scu.model import adapter_files
from granite_scu.storage.run_folder import ADAPTER_CONFIG, read_json
from granite_scu.storage.working_folder import found_from_here

BASE = "base"
"""The name of the base model in every result."""


@dataclass(frozen=True)
class Subject:
    """A model to be scored.

    Attributes:
        name: in tables.
        given: what the user wrote; a folder, or the hub id of a whole model.
        kind: an adapter of a base model, or a model of its own.
        base: the name of the base model; of a whole model its own.
        run: the run folder that it lies in; None where it lies in none.
    """

    name: str
    given: str
    kind: Literal["adapter", "model"]
    base: str
    run: Path | None = None

    @property
    def path(self) -> Path:
        return Path(self.given).expanduser()


def identify(named: Sequence[str]) -> list[Subject]:
    """What each of the names stands for.

    Raises:
        UserError: a folder that is neither a run, an adapter nor a model; something named twice.
    """
    labels = _labels(named)
    subjects = [_identify(given, label) for given, label in zip(named, labels, strict=True)]
    places = [str(subject.path.resolve()) if subject.path.exists() else subject.given for subject in subjects]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UserError(f"{subjects[number].given}: is named twice")
    return subjects


def shared_base(subjects: Sequence[Subject], asked: str | None) -> str | None:
    """The base model of all adapters.

    Args:
        subjects: the adapters, and whole models, which say nothing about it.
        asked: ``--model``.

    Returns:
        None where there is neither an adapter nor a model asked for.

    Raises:
        UserError: the adapters are for different bases, or for another than the one asked for.
    """
    adapters = [subject for subject in subjects if subject.kind == "adapter"]
    if asked is None and not adapters:
        return None
    base = asked or adapters[0].base
    for adapter in adapters:
        if adapter_files.may_be_same(adapter.base, base):
            continue
        if asked:
            raise UserError(f"{adapter.given}: is an adapter for {adapter.base}, not for --model {asked}")
        raise UserError(
            f"{adapter.given}: is an adapter for {adapter.base}, and {adapters[0].given} is one for {base}; "
            "score them one at a time"
        )
    return base


def _identify(given: str, label: str) -> Subject:
    path = Path(given).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return Subject(label, given, "model", given)
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{given}: is a file; give a run folder, an adapter's folder, a checkpoint or a model")
        if path.parent != Path() and path.parent.is_dir():
            raise UserError(
                f"{given}: no such folder in {path.parent}; `granite-scu runs {path.parent}` lists its runs"
            )
        if not is_local(given):
            return Subject(label, given, "model", given)  # an embedded model or a hub id
        raise UserError(f"{given}: no such folder")
    is_whole = (path / "config.json").is_file() or any(path.glob("*.gguf"))
    if is_whole and not (path / ADAPTER_CONFIG).is_file():
        return Subject(label, given, "model", given)
    adapter_files.require_files(path, given)
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{path / ADAPTER_CONFIG}: names no base model (base_model_name_or_path)")
    run = adapter_files.run_of(path)
    return Subject(label, given, "adapter", found_from_here(base, run) if run else base, run)


def _labels(named: Sequence[str]) -> list[str]:
    """Names for the table: the last part of each path, more where that would not tell them apart."""
    short = [_short(name) for name in named]
    labels = [label if short.count(label) == 1 else name for name, label in zip(named, short, strict=True)]
    return [f"./{label}" if label == BASE else label for label in labels]  # the base model has that name


def _short(name: str) -> str:
    path = Path(name).expanduser()
    return adapter_files.short_name(path.resolve() if path.exists() else Path(name))
