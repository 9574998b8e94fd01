"""The learning rate over a run: its course, and the sum of it, which says how far the weights can move."""

import math
from typing import NamedTuple

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


class PlannedRates(NamedTuple):
    """The sums of a run's learning rates, in closed form: a run may be planned for any number of steps."""

    optimizer: OptimizerConfig
    steps: int

    def after(self, step: int) -> float:
        """The sum of the learning rates of the first ``step`` optimizer steps, or of all where that is more."""
        warmup, taken = min(self.optimizer.warmup_steps, self.steps), min(step, self.steps)
        rising, n = min(taken, warmup), max(0, taken - warmup)
        length = max(1, self.steps - self.optimizer.warmup_steps)
        match self.optimizer.schedule:
            case "cosine":  # Dirichlet's kernel: the cosines of 0, a, ..., (n - 1) a
                a = math.pi / length
                after = (n + math.sin((n - 0.5) * a) / (2 * math.sin(a / 2)) + 0.5) / 2
            case "linear":
                after = n - n * (n - 1) / (2 * length)
            case _:
                after = float(n)
        return self.optimizer.learning_rate * (rising * (rising + 1) / (2 * (self.optimizer.warmup_steps + 1)) + after)
