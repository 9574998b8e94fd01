"""The learning rate over a run: its course, and the sum of it, which says how far the weights can move."""

import math
from itertools import accumulate

from granite_scu.config.settings import OptimizerConfig


def schedule(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The learning rate at an optimizer step, as a fraction of its peak: warm-up, then the course chosen."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    match config.schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return 1 - progress
        case _:
            return 1.0


def cumulated_rates(optimizer: OptimizerConfig, steps: int) -> list[float]:
    """The sum of the learning rates of the first 0, 1, ... ``steps`` optimizer steps."""
    rates = (optimizer.learning_rate * schedule(step, optimizer, steps) for step in range(steps))
    return list(accumulate(rates, initial=0.0))
