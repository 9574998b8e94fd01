"""What describes a run: everything that was asked for."""

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import jsonargparse
import yaml

from granite_scu.config import flags
from granite_scu.config.errors import UserError
from granite_scu.config.settings import (
    SEED,
    BaseConfig,
    ControlConfig,
    DataConfig,
    DriftConfig,
    LoraConfig,
    OptimizerConfig,
    PriorConfig,
    RunConfig,
    check_budget,
)


@dataclass(frozen=True)
class Request:
    """Everything that describes a run.

    Attributes:
        trainer: a ``TrainerConfig`` by name.
        seed: of everything random.
        yaml: the resolved configuration as YAML, which feeds straight back into the CLI.
        hardware: the preset whose values are in it; null where none was asked for.
        given: dotted keys that the user gave a value, by flag or YAML; what a preset sets is not among them.
    """

    base: BaseConfig
    lora: LoraConfig
    optimizer: OptimizerConfig
    prior: PriorConfig
    data: DataConfig
    control: ControlConfig
    drift: DriftConfig
    run: RunConfig
    trainer: dict[str, Any]
    seed: int
    yaml: str = field(repr=False)
    hardware: str | None = None
    given: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def blocks_per_step(self) -> int:
        """Blocks of an optimizer step on each device."""
        accumulated: int = self.trainer["accumulate_grad_batches"]
        return self.data.batch_size * accumulated

    @property
    def changed(self) -> list[str]:
        """The settings that were asked for and differ from the defaults, by dotted key."""
        asked, usual = (_dotted(yaml.safe_load(text)) for text in (self.yaml, Request.from_dotted({}).yaml))
        return [name for name, value in asked.items() if value != usual.get(name)]

    def with_values(self, values: Mapping[str, Any]) -> "Request":
        """The request with values by dotted key, also in the YAML that the run folder keeps: a run continues by it."""
        written = yaml.safe_load(self.yaml)
        groups: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            group, _, name = key.partition(".")
            written[group][name] = value
            groups.setdefault(group, {})[name] = value
        trainer = self.trainer | groups.pop("trainer", {})
        changed: dict[str, Any] = {group: replace(getattr(self, group), **named) for group, named in groups.items()}
        return replace(self, trainer=trainer, yaml=yaml.safe_dump(written, sort_keys=False), **changed)

    @classmethod
    def from_dotted(
        cls, settings: Mapping[str, Any], hardware: str | None = None, given: Iterable[str] | None = None
    ) -> "Request":
        """A request over the defaults.

        Args:
            settings: by dotted key, as ``{"base.name": "tiny-granite-h", "trainer.max_steps": 100}``; a text may stand
                for any value, in YAML.
            hardware: as of the class.
            given: as of the class; by default all that has a value.

        Raises:
            UserError: a key that there is not, or a value that its setting cannot have.
        """
        parser = settings_parser()
        try:
            parsed = parser.parse_object(nested(settings))
        except (jsonargparse.ArgumentError, TypeError) as error:
            raise _wrong(settings, str(error)) from error
        given = [key for key, value in settings.items() if value is not None] if given is None else given
        return cls.from_parsed(parsed, hardware, given)

    @classmethod
    def from_parsed(cls, parsed: jsonargparse.Namespace, hardware: str | None, given: Iterable[str]) -> "Request":
        """What a parser with ``add_settings`` has read; ``hardware`` and ``given`` as of the class.

        Raises:
            UserError: a value that jsonargparse lets through and its setting cannot have.
        """
        _check_nulls(parsed)
        seed = parsed["seed_everything"]
        if seed is None or not 0 <= seed < 2**32:
            raise UserError(f"--seed {seed}: must be a whole number from 0 to {2**32 - 1}")
        if parsed["lora"]["adapter"] is None:  # what nulls stand for; an adapter has its own
            lora = LoraConfig(**parsed["lora"].as_dict()).resolved()
            parsed["lora"]["rank"], parsed["lora"]["alpha"] = lora.rank, lora.alpha
        parser = settings_parser()
        built = parser.instantiate_classes(parsed)
        check_budget(built["drift"], built["control"], built["run"])
        return cls(
            **{group: built[group] for group in flags.GROUPS},
            trainer=dict(vars(built["trainer"])),
            seed=seed,
            yaml=parser.dump(parsed, skip_none=False),
            hardware=hardware,
            given=frozenset(given),
        )


@cache
def settings_parser() -> jsonargparse.ArgumentParser:
    """The parser of every setting."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--seed_everything", type=int, default=SEED)
    add_settings(parser)
    return parser


def add_settings(parser: jsonargparse.ArgumentParser) -> None:
    """Add the dataclasses of ``settings``."""
    for group, kind in flags.SETTINGS.items():
        parser.add_class_arguments(kind, group)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"group.name": value}`` as ``{"group": {"name": value}}``."""
    groups: dict[str, Any] = {}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        if name:
            groups.setdefault(group, {})[name] = value
        else:
            groups[group] = value
    return groups


def _wrong(settings: Mapping[str, Any], message: str) -> UserError:
    """What is wrong with settings that the parser refused: the first that it refuses alone."""
    for key, value in settings.items():
        try:
            settings_parser().parse_object(nested({key: value}))
        except (jsonargparse.ArgumentError, TypeError):
            if key not in {**flags.HINTS, "seed_everything": int}:
                return UserError(f"--{key}: there is no such setting")
            shown = reprlib.repr(value) if isinstance(value, list | dict) else value
            return UserError(f"--{key} {shown}: must be {_described(flags.HINTS.get(key, int))}")
    return UserError(" ".join(message.split()))


def _described(hint: Any) -> str:
    """The values that a setting may have, in words."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    told: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            told += map(str, get_args(kind))
        elif get_origin(kind) in (list, dict):
            told.append("a list" if get_origin(kind) is list else "a mapping")
        elif kind is not NoneType and not (kind is str and float in kinds):
            told.append(words[kind])
    return " or ".join(told)


def _check_nulls(parsed: jsonargparse.Namespace) -> None:
    """Refuse null for a setting that has no such value, which jsonargparse lets through. Raises UserError."""
    for key, hint in flags.HINTS.items():
        group, _, name = key.partition(".")
        if parsed[group][name] is None and NoneType not in get_args(hint):
            raise UserError(f"--{key} null: must have a value; leave it out for the default, {flags.DEFAULTS[key]}")


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"group": {"name": value}}`` as ``{"group.name": value}``."""
    groups = ((group, entry if isinstance(entry, dict) else {"": entry}) for group, entry in settings.items())
    return {f"{group}.{name}".rstrip("."): value for group, entries in groups for name, value in entries.items()}
