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
    ADVISED_DRIFT,
    SEED,
    BaseConfig,
    ControlConfig,
    DataConfig,
    DriftConfig,
    LoraConfig,
    OptimizerConfig,
    PriorConfig,
    RunConfig,
    TrainerConfig,
    check,
    check_refused,
    holding_drift,
)
from granite_scu.config.untrusted_input import SECRET_NAME
from granite_scu.control import find, tracks
from granite_scu.control.diagnostics.equilibrium import Equilibrium


@dataclass(frozen=True)
class Request:
    """Everything that describes a run. Making one refuses settings of several groups that contradict one another.

    Attributes:
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
    trainer: TrainerConfig
    seed: int
    yaml: str = field(repr=False)
    hardware: str | None = None
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        is_seed = isinstance(self.seed, int) and 0 <= self.seed < 2**32
        check(is_seed, "--seed", self.seed, f"must be a whole number from 0 to {2**32 - 1}")
        check_budget(self.drift, self.control, self.run)
        self.control_held.law()
        if self.run.stop_at_equilibrium:
            check_equilibrium_stop(self.control)
        self._check_law()
        base, run = self.base, self.run
        for contradicts, why in (
            (
                run.early_stopping is not None and not self.data.is_validated,
                f"--early-stopping {run.early_stopping}: acts by validations, and nothing is held out to validate on "
                "(--held-out-share 0); leave it out, or give --validation-data",
            ),
            (
                base.kernels in ("cuda", "hub") and self.trainer.deterministic,
                f"--kernels {base.kernels}: compiled kernels may add in any order, and --deterministic wants one; drop "
                "one",
            ),
            (
                base.attention == "flash_attention_2" and self.data.isolate_documents,
                "--attn flash_attention_2: documents in a block would see one another; use --attn sdpa, or allow it "
                "with --no-isolate-documents",
            ),
            (
                run.fsdp and base.quantize_4bit,
                "--fsdp: weights in 4 bits cannot be shared out; leave out --4bit-quantization or --fsdp",
            ),
            (
                run.fsdp and base.compile,
                "--fsdp: layers that are gathered cannot be compiled in one; leave out --torch-compile",
            ),
            (
                run.fsdp and base.gradient_checkpointing == "selective",
                "--fsdp: selective recomputation is of compiled layers, and here none are; give "
                "--gradient-checkpointing on",
            ),
            (
                self.lora.adapter is not None and self.control.actuator == "decoupled",
                "--actuator decoupled: cannot go together with --adapter: it shrinks A and B, which leads to no "
                "adapter at all; what leads back to the one that training starts from has twice the rank",
            ),
        ):
            if contradicts:
                raise UserError(why)

    @property
    def control_held(self) -> ControlConfig:
        """The settings of the law: as it is asked for, or as it holds drift."""
        if not isinstance(self.drift.max_drift, float):
            return self.control
        own = {name for name in vars(self.control) if f"control.{name}" in self.given}
        return holding_drift(self.control, self.drift.max_drift, own)

    def _check_law(self) -> None:
        """Refuse a law with what it says itself that it does not go together with. Raises UserError."""
        name = self.control.controller
        asked = {
            "--stream": self.data.stream,
            "--adapter": self.lora.adapter is not None,
            "--held-out-share 0": not self.data.is_validated,
        }
        check_refused(name, find(name), [flag for flag, is_given in asked.items() if is_given])

    @property
    def blocks_per_step(self) -> int:
        """Blocks of an optimizer step on each device."""
        return self.data.batch_size * self.trainer.accumulate_grad_batches

    @property
    def changed(self) -> list[str]:
        """The settings that were asked for and differ from the defaults, by dotted key."""
        asked, usual = (_dotted(yaml.safe_load(text)) for text in (self.yaml, Request.from_dotted({}).yaml))
        return [name for name, value in asked.items() if value != usual.get(name)]

    @property
    def stored(self) -> str:
        """The YAML as others may read it: without what loggers and callbacks are given by such a name as a key's."""
        written = yaml.safe_load(self.yaml)
        for name in ("logger", "callbacks"):
            written["trainer"][name] = _without_secrets(written["trainer"].get(name))
        return str(yaml.safe_dump(written, sort_keys=False))

    def with_values(self, values: Mapping[str, Any]) -> "Request":
        """The request with values by dotted key, also in the YAML that the run folder keeps: a run continues by it."""
        written = yaml.safe_load(self.yaml)
        groups: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            group, _, name = key.partition(".")
            written[group][name] = value
            groups.setdefault(group, {})[name] = value
        changed: dict[str, Any] = {group: replace(getattr(self, group), **named) for group, named in groups.items()}
        return replace(self, yaml=yaml.safe_dump(written, sort_keys=False), **changed)

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
        given = (
            [key for key, value in _dotted(nested(settings)).items() if value is not None] if given is None else given
        )
        return cls.from_parsed(parsed, hardware, given)

    @classmethod
    def from_parsed(cls, parsed: jsonargparse.Namespace, hardware: str | None, given: Iterable[str]) -> "Request":
        """What a parser with ``add_settings`` has read; ``hardware`` and ``given`` as of the class.

        Raises:
            UserError: a value that jsonargparse lets through and its setting cannot have.
        """
        _check_nulls(parsed)
        if parsed["lora"]["adapter"] is None:  # what nulls stand for; an adapter has its own
            lora = LoraConfig(**parsed["lora"].as_dict()).resolved()
            parsed["lora"]["rank"], parsed["lora"]["alpha"] = lora.rank, lora.alpha
        given = frozenset(given)
        if "control.controller" not in given and not asks_for_control(key for key in given if parsed[key] is not None):
            parsed["control"]["controller"] = "none"
        # Before the groups are built: what one says of itself may be beside the point here.
        check_budget(DriftConfig(**parsed["drift"].as_dict()), parsed["control"], parsed["run"])
        parser = settings_parser()
        built = parser.instantiate_classes(parsed)
        return cls(
            **{group: built[group] for group in flags.SETTINGS},
            seed=parsed["seed_everything"],
            yaml=parser.dump(parsed, skip_none=False),
            hardware=hardware,
            given=given,
        )


def asks_for_control(given: Iterable[str]) -> bool:
    """Whether one of the settings that were given has use for a controller. Plain LoRA learns as much in less time
    (research/evidence/real/findings.md), so it is the default of all other runs."""
    beside = "run.stop_at_equilibrium", "drift.max_drift"
    return any(key in beside or (key.startswith("control.") and key != "control.every") for key in given)


def check_budget(drift: DriftConfig, control: ControlConfig, run: RunConfig) -> None:
    """Refuse a budget of drift beside what holds something else, and general text that no budget has use for.

    Raises:
        UserError: another setpoint, law or way to act, a stop that waits for S, or general text and no budget.
    """
    if not isinstance(drift.max_drift, float):
        remedy = f"add one, such as --max-drift {ADVISED_DRIFT}, or leave it out"
        if run.resume:
            remedy = "a run that continues has one or none as before: leave --max-drift and this as they were"
        alone = f"is read for a budget of drift alone; {remedy}"
        check(not drift.general_files, "--general-data", " ".join(drift.general_files), alone)
        check(drift.general_tokens == DriftConfig.general_tokens, "--general-tokens", drift.general_tokens, alone)
        return
    one = "the loop holds either drift or S"
    for flag, value, usual, why in (
        ("--target-s", control.target_s, None, one),
        ("--controller", control.controller, "pi", "drift is held by --controller pi"),
        ("--actuator", control.actuator, "loss", "drift is held through the loss"),
        ("--stop-at-equilibrium", run.stop_at_equilibrium, None, one),
    ):
        remedy = f"{why}; leave out {flag} {value}, or --max-drift"
        check(value == usual, "--max-drift", f"{100 * drift.max_drift:g}%", remedy)


def check_equilibrium_stop(config: ControlConfig) -> None:
    """Refuse ``--stop-at-equilibrium`` where no window of ticks can show that a closed loop holds S.

    S does not settle under some controllers. A law with a deadband rests inside it, where it does not answer to S.
    The measure of factors starts above 0, so that how far S has come says nothing of how far the weights moved.

    Raises:
        UserError: it is such a controller or measure, or has a deadband, or a setpoint near 1.
    """
    if config.measure != "delta":
        reason = "judges how far the weights moved by how far S rose from 0, where that measure does not start"
        raise UserError(f"--stop-at-equilibrium: --measure {config.measure}: {reason}; use --early-stopping")
    if not tracks(find(config.controller)):
        reason = "follows no setpoint, so nothing settles"
        raise UserError(f"--stop-at-equilibrium: --controller {config.controller} {reason}; use --early-stopping")
    if isinstance(config.target_s, float) and (1 + Equilibrium.band) * config.target_s >= 1:
        reason = f"its band of {Equilibrium.band:.0%} reaches to 1, which S cannot cross, so nothing can be shown"
        raise UserError(f"--stop-at-equilibrium: --target-s {config.target_s:g}: {reason}; take at most 0.9")
    own = find(config.controller).__dataclass_fields__.get("deadband")
    if own is None:  # a law without one skips it
        return
    width: Any = own.default if config.deadband is None else config.deadband
    if width > 0:
        whose = f", {config.controller}'s own" if config.deadband is None else ""
        reason = "S that is held lies inside, where the law does not answer to it, and no run would stop"
        raise UserError(f"--stop-at-equilibrium: --deadband {width:g}{whose}: {reason}; set --deadband 0")


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


_SEVERAL = {str: "texts", float: "numbers"}


def _described(hint: Any) -> str:
    """The values that a setting may have, in words."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    told: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            told += map(str, get_args(kind))
        elif get_origin(kind) is list:
            told.append(f"a list of {_SEVERAL.get(get_args(kind)[0], 'mappings')}")
        elif get_origin(kind) is dict:
            told.append("a mapping")
        elif kind is not NoneType and not (kind is str and float in kinds):
            told.append(words[kind])
    return " or ".join(told)


def _check_nulls(parsed: jsonargparse.Namespace) -> None:
    """Refuse null for a setting that has no such value, which jsonargparse lets through. Raises UserError."""
    for key, hint in flags.HINTS.items():
        group, _, name = key.partition(".")
        if parsed[group][name] is None and NoneType not in get_args(hint):
            usual = "none" if key == "control.controller" else flags.DEFAULTS[key]
            raise UserError(f"--{key} null: must have a value; leave it out for the default, {usual}")


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"group": {"name": value}}`` as ``{"group.name": value}``."""
    groups = ((group, entry if isinstance(entry, dict) else {"": entry}) for group, entry in settings.items())
    return {f"{group}.{name}".rstrip("."): value for group, entries in groups for name, value in entries.items()}


def _without_secrets(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: "***" if SECRET_NAME.search(name) else _without_secrets(each) for name, each in value.items()}
