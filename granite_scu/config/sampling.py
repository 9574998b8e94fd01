"""How a text is continued."""

import math
from dataclasses import dataclass

from granite_scu.config.errors import UserError
from granite_scu.config.settings import SEED


@dataclass(frozen=True)
class Sampling:
    """How a text is continued.

    Attributes:
        max_new_tokens: length of the continuation, unless the model ends it.
        temperature: of the softmax that tokens are drawn from; 0 takes the likeliest, always.
        top_p: draw from the likeliest tokens that have this probability together; null from all.
        seed: of the draws; each model starts from it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = SEED

    def __post_init__(self) -> None:
        warm = self.temperature > 0
        rules = (
            (self.max_new_tokens >= 1, "max_new_tokens", "must be at least 1"),
            (0 <= self.temperature < math.inf, "temperature", "must be 0 (no draws) or positive, and finite"),
            (self.top_p is None or 0 < self.top_p <= 1, "top_p", "must be in (0, 1]"),
            (self.top_p is None or warm, "top_p", "does nothing at --temperature 0, which draws nothing; raise it"),
            (0 <= self.seed < 2**63, "seed", "must be a whole number from 0 on"),
        )
        for valid, field, rule in rules:
            if not valid:
                raise UserError(f"--{field.replace('_', '-')} {getattr(self, field)}: {rule}")
