"""The learning rate over a run: its course, and the sum of it, which says how far the weights can move."""

import math
from itertools import accumulate

from granite_scu.config.settings import OptimizerConfig


def schedule(step: int, course: str, warmup_steps: int, total_steps: int) -> float:
    """The learning rate at an optimizer step, as a fraction of its peak: warm-up, then the course chosen."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    match course:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return 1 - progress
        case _:
            return 1.0


def cumulated_rates(optimizer: OptimizerConfig, steps: int) -> list[float]:
    """The sum of the learning rates of the first 0, 1, ... ``steps`` optimizer steps."""
    course, warmup_steps = optimizer.schedule, optimizer.warmup_steps
    rates = (optimizer.learning_rate * schedule(step, course, warmup_steps, steps) for step in range(steps))
    return list(accumulate(rates, initial=0.0))
