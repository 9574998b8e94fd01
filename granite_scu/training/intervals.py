"""When a run validates and saves. Imports nothing heavy, for a law may be refused by it before torch is there."""

from typing import NamedTuple

from granite_scu.config.settings import RunConfig

MAX_SAVE_STEPS = 500
"""Optimizer steps between two checkpoints of a long run."""


class Intervals(NamedTuple):
    """Optimizer steps between two validations, and between two checkpoints."""

    validation: int
    checkpoint: int


def intervals_of(asked: RunConfig, steps: int) -> Intervals:
    """The intervals of a run whose validations are settled: checkpoints as asked for, or as suit the length."""
    return Intervals(asked.eval_steps or steps, asked.save_steps or min(MAX_SAVE_STEPS, max(1, steps // 2)))
