"""What describes a run: everything that was asked for, and what it comes to."""

from dataclasses import dataclass, field
from typing import Any

from granite_scu.config.settings import (
    BaseConfig,
    ControlConfig,
    DataConfig,
    LoraConfig,
    OptimizerConfig,
    PriorConfig,
    RunConfig,
)


@dataclass(frozen=True)
class Request:
    """Everything that describes a run.

    Attributes:
        trainer: arguments of Lightning's Trainer as the user gave them.
        seed: of everything random.
        yaml: the resolved configuration as YAML, which feeds straight back into the CLI.
        hardware: the preset whose values are in it; null where none was asked for.
    """

    base: BaseConfig
    lora: LoraConfig
    optimizer: OptimizerConfig
    prior: PriorConfig
    data: DataConfig
    control: ControlConfig
    run: RunConfig
    trainer: dict[str, Any]
    seed: int
    yaml: str = field(repr=False)
    hardware: str | None = None
