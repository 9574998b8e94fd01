"""What describes a run: everything that was asked for."""

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

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
    def from_dotted(cls, settings: Mapping[str, Any]) -> "Request":
        """A request over the defaults, without a command line.

        Args:
            settings: by dotted key, as ``{"base.name": "tiny-granite-h", "trainer.max_steps": 100}``.

        Raises:
            UserError: a key that there is not, or a value that its setting cannot have.
        """
        parser = _settings_parser()
        try:
            given = parser.parse_args([f"--{key}={_as_argument(value)}" for key, value in settings.items()])
        except jsonargparse.ArgumentError as error:
            raise UserError(" ".join(str(error).split())) from error
        return cls.from_parsed(parser, given, given=[key for key, value in settings.items() if value is not None])

    @classmethod
    def from_parsed(
        cls,
        parser: jsonargparse.ArgumentParser,
        parsed: jsonargparse.Namespace,
        hardware: str | None = None,
        given: Iterable[str] = (),
    ) -> "Request":
        """What a parser with ``add_settings`` has read; ``hardware`` and ``given`` as of the class.

        Raises:
            UserError: a value that jsonargparse lets through and its setting cannot have.
        """
        check_values(parsed, flags.SETTINGS)
        if parsed["lora"]["adapter"] is None:  # what nulls stand for; an adapter has its own
            lora = LoraConfig(**parsed["lora"].as_dict()).resolved()
            parsed["lora"]["rank"], parsed["lora"]["alpha"] = lora.rank, lora.alpha
        built = parser.instantiate_classes(parsed)
        check_budget(built["drift"], built["control"], built["run"])
        return cls(
            **{group: built[group] for group in flags.GROUPS},
            trainer=dict(vars(built["trainer"])),
            seed=parsed["seed_everything"],
            yaml=parser.dump(parsed, skip_none=False),
            hardware=hardware,
            given=frozenset(given),
        )


@cache
def _settings_parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--seed_everything", type=int, default=SEED)
    add_settings(parser)
    return parser


def add_settings(parser: jsonargparse.ArgumentParser) -> None:
    """Add the dataclasses of ``settings``."""
    for group, kind in flags.SETTINGS.items():
        parser.add_class_arguments(kind, group)


def check_values(given: jsonargparse.Namespace, groups: Mapping[str, Any]) -> None:
    """Refuse what jsonargparse lets through: a group that is no mapping, and null for a setting that has no such value.

    Raises:
        UserError: either of them.
    """
    for group, kind in groups.items():
        if not isinstance(given[group], Mapping | jsonargparse.Namespace):
            raise UserError(f"{group}: must be a mapping of settings, and is {reprlib.repr(given[group])}")
        for name, hint in get_type_hints(kind).items():
            if given[group][name] is None and NoneType not in get_args(hint):
                default = kind.__dataclass_fields__[name].default
                raise UserError(f"{group}.{name} null: must have a value; leave it out for the default, {default}")


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"group": {"name": value}}`` as ``{"group.name": value}``."""
    groups = ((group, entry if isinstance(entry, dict) else {"": entry}) for group, entry in settings.items())
    return {f"{group}.{name}".rstrip("."): value for group, entries in groups for name, value in entries.items()}


def _as_argument(value: Any) -> str:
    """A value as a command line has it: YAML, which knows neither None nor True."""
    return json.dumps(value) if value is None or isinstance(value, bool | list | dict) else str(value)
