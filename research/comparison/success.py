"""What a protocol called success before its first run, and what came of it."""

from typing import Any

import numpy as np

from research.comparison.plan import Plan
from research.comparison.protocol import Task
from research.comparison.rows import SWEEP, Row, best_of, common_seeds, rows_of

MEAN, WORST = 0.002, 0.01
"""What the judged arm may end above each task's swept best lambda: on average, and on the worst task."""

EARLY_STOPPING = "early-stopping"


def success(plan: Plan) -> list[dict[str, Any]]:
    """The criteria of ``evidence/protocol.md``; none where the protocol judges no arm, or a task lacks its runs.

    All are of the seeds that the judged arm, early stopping and the whole sweep have on a task.

    Returns:
        Of each criterion ``asked``, a clause; ``found``, a ratio of bits per token minus 1, whether it is ``met``,
        ``seeds``, how many of the protocol's the task with the fewest has: with fewer than all this is not decided, and
        whether it is ``tested``: not where the arm's rule was formed when the tasks were known.
    """
    name, tasks = plan.protocol.judged, plan.protocol.tasks
    found = [_excesses(plan, task, name) for task in tasks] if name else []
    known = [excesses for excesses in found if excesses]
    if not known or len(known) < len(tasks):
        return []
    over_sweep, over_rival, seeds = zip(*known, strict=True)
    asked = [
        (f"{name} at most {MEAN:.1%} above the swept best λ, on average", np.mean(over_sweep), MEAN),
        (f"{name} at most {WORST:.0%} above it on the worst task", max(over_sweep), WORST),
        (f"{name} below {EARLY_STOPPING}, on average", np.mean(over_rival), 0.0),
    ]
    return [
        {
            "asked": words,
            "found": float(value),
            "met": bool(value <= most if most else value < 0),
            "seeds": min(seeds),
            "tested": name not in plan.protocol.formed_on_all,
        }
        for words, value, most in asked
    ]


def _excesses(plan: Plan, task: Task, name: str) -> tuple[float, float, int] | None:
    """Test bits of the judged arm over those of the swept best and of early stopping, minus 1; the number of seeds."""
    sweep, rivals = rows_of(plan, task, SWEEP), rows_of(plan, task, (EARLY_STOPPING,))
    judged = rows_of(plan, task, (name,))
    seeds = common_seeds([*judged, *rivals, *sweep])
    best = best_of(sweep, seeds)
    if not (judged and rivals and best):
        return None
    bits = _bits(judged[0], seeds)
    return bits / _bits(best, seeds) - 1, bits / _bits(rivals[0], seeds) - 1, len(seeds)


def _bits(row: Row, seeds: list[int]) -> float:
    return float(row.scores(seeds).bits_per_token.mean())
