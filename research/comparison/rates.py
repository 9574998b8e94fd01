"""What the learning rate makes of it: the arms whose rate is tuned, each rate against early stopping at the same."""

from typing import Any

import numpy as np

from research.comparison.plan import Cell, Plan
from research.comparison.protocol import Arm, Task
from research.comparison.rows import scores_of


def rates(plan: Plan) -> list[dict[str, Any]]:
    """Of each arm that is scored by its best validated adapter and has a learning rate of its own: at every rate that
    was tried, its test bits over those of early stopping at that rate, minus 1, on the first seed."""
    tuned = plan.protocol.tuned
    stopped = tuned.get("stopped")
    arms = [arm for arm in tuned.values() if stopped and arm is not stopped and arm.adapter == stopped.adapter]
    found = []
    for arm in arms:
        for rate in plan.protocol.rates:
            excess = {task.name: _excess(plan, task, arm, stopped, rate) for task in plan.tasks}
            known = {name: value for name, value in excess.items() if value is not None}
            if known:
                mean = float(np.mean(list(known.values())))
                found.append({"arm": arm.label, "learning_rate": rate, "mean_excess": mean, "excess": known})
    return found


def _excess(plan: Plan, task: Task, arm: Arm, rival: Arm, rate: float) -> float | None:
    """None where a run is not finished or has failed."""
    records = [plan.record(Cell(task, each, plan.protocol.seeds[0], rate)) for each in (arm, rival)]
    if not all(record and not record["failed"] for record in records):
        return None
    bits = [scores_of([record], arm.adapter).bits_per_token.item() for record in records]
    return bits[0] / bits[1] - 1
