"""Arms against each other over all tasks at once: the questions that a table for each task leaves to the eye.

The tasks are those that they are: an interval says what other seeds and documents would make of the average over them,
and nothing of other tasks. Tasks that are scored on the same documents are drawn the same ones.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from granite_scu.evaluation.statistics import Estimate
from research.comparison import bootstrap
from research.comparison.bootstrap import Pair, Scores
from research.comparison.plan import Plan
from research.comparison.rows import (
    SWEEPS,
    SWEPT,
    SWEPT_STOPPED,
    Row,
    best_of_sweep,
    common_seeds,
    decides,
    rows_of,
)

ONE = "one "
"""Before an arm's name: a rival that is no arm, one setting for all tasks, chosen by validation on these very tasks."""

RIVALS = (SWEPT, SWEPT_STOPPED, f"{ONE}fixed", f"{ONE}fixed-stopped", "none", "early-stopping")
QUESTIONS = {
    "pi": (*RIVALS, "fixed-at-mean", "replay"),
    "pi-auto": (*RIVALS, "pi"),
    "pi-auto-stopped": (
        *RIVALS,
        "pi-at-45-stopped",
        f"{ONE}cosine-stopped",
        "cosine-stopped",
        "cascade-stopped",
        "fixed-at-auto-mean-stopped",
        "replay-of-auto-stopped",
        "pi-auto",
    ),
    "early-stopping": (SWEPT, f"{ONE}fixed", "none"),
    f"{ONE}fixed-stopped": (SWEPT, "early-stopping"),
    "cascade": (*RIVALS, "pi-auto", "cosine", f"{ONE}cosine", "fixed-at-cascade-mean", "replay-of-cascade"),
}
"""What is asked of each law, and of what needs none: is it better than these?"""


def pairs(plan: Plan) -> list[dict[str, Any]]:
    """A line for each question that two tasks or more can answer; the task that S* was chosen on says nothing of PI.

    Returns:
        Of each line ``arm`` and ``rival``, by name; ``tasks``, how many seeds both have, of each task on which that is
        two or more; ``excess``, test bits per token over the rival's minus 1, averaged over these, with its interval;
        ``excess_of_unseen``, that of the tasks that had no part in choosing S* or in forming a law (None for fewer than
        two, and where all formed the law; one setting is all the same);
        ``without_largest``, the average without the longest test document of each task; ``better`` and ``worse``, the
        tasks that decide and whose own interval lies to one side of 0; ``lost``, the tasks that are left out because
        runs failed; ``verdict``, the average in a sentence.
    """
    every = [_line(plan, arm, rival) for arm, rivals in QUESTIONS.items() for rival in rivals]
    return [line for line in every if line]


def _line(plan: Plan, arm: str, rival: str) -> dict[str, Any] | None:
    of_arm, of_rival = _rows(plan, arm), _rows(plan, rival)
    chosen_on = {plan.protocol.selection_task} if "pi" in (arm, rival) else set()
    found = {}
    for task in plan.tasks:
        both = [rows[task.name] for rows in (of_arm, of_rival) if task.name in rows]
        seeds = common_seeds(both)
        if len(both) == 2 and len(seeds) > 1 and task.name not in chosen_on:
            found[task.name] = Pair(both[0].scores(seeds), both[1].scores(seeds), task.scored_on)
    if len(found) < 2:
        return None
    seeds_of = {name: len(pair.arm.nats) for name, pair in found.items()}
    decided = {name: pair for name, pair in found.items() if decides(seeds_of[name])}
    alone = {name: bootstrap.relative_excess(pair.arm, pair.reference) for name, pair in decided.items()}
    unseen = [
        pair for name, pair in found.items() if name in plan.protocol.unseen and arm not in plan.protocol.formed_on_all
    ]
    trimmed = [_without_largest(pair.arm) / _without_largest(pair.reference) - 1 for pair in found.values()]
    lost = (_lost(plan, arm, of_arm) | _lost(plan, rival, of_rival)) - chosen_on
    excess = bootstrap.mean_relative_excess(list(found.values()))
    asked, named = _named(arm, of_arm), _named(rival, of_rival)
    return {
        "arm": asked,
        "rival": named,
        "tasks": seeds_of,
        "excess": asdict(excess),
        "excess_of_unseen": asdict(bootstrap.mean_relative_excess(unseen)) if len(unseen) > 1 else None,
        "without_largest": float(np.mean(trimmed)),
        "better": [name for name, excess in alone.items() if excess.high < 0],
        "worse": [name for name, excess in alone.items() if excess.low > 0],
        "lost": sorted(lost),
        "verdict": _verdict(f"{asked} against {named}, over {len(found)} tasks", excess, list(seeds_of.values()), lost),
    }


def _verdict(about: str, excess: Estimate, seeds: list[int], lost: set[str]) -> str:
    """One sentence. An average decides nothing where a task in it does not, or where one is out of it that failed."""
    if lost:
        return f"{about}: runs that failed on {', '.join(sorted(lost))} leave it open ({excess.mean:+.2%})"
    if few := sum(not decides(count) for count in seeds):
        where = f" on {few} of them" if few < len(seeds) else ""
        return f"{about}: two seeds{where} decide nothing ({excess.mean:+.2%})"
    if not excess.differs:
        return f"{about}: no difference shown ({excess.mean:+.2%}, {excess.low:+.2%} to {excess.high:+.2%})"
    word = "worse" if excess.mean > 0 else "better"
    least, most = sorted((abs(excess.low), abs(excess.high)))
    return f"{about}: {word} by {abs(excess.mean):.2%} ({least:.2%} to {most:.2%})"


def _rows(plan: Plan, name: str) -> dict[str, Row]:
    """By task, where there are runs of which none failed."""
    if name.startswith(ONE):
        return _one_for_all(plan, name.removeprefix(ONE))
    return {task.name: row for task in plan.tasks if (row := best_of_sweep(plan, task, _arms(name)))}


def _arms(name: str) -> tuple[str, ...]:
    """Names of the protocol's arms that are meant."""
    return SWEEPS.get(name, (name.removeprefix(ONE),))


def _lost(plan: Plan, name: str, rows: dict[str, Row]) -> set[str]:
    """The tasks that have no row because runs failed, not because they are still to be done."""
    missing = {each.name: rows_of(plan, each, _arms(name)) for each in plan.tasks if each.name not in rows}
    return {task for task, found in missing.items() if any(r.failed for r in found) and all(r.begun for r in found)}


def _one_for_all(plan: Plan, name: str) -> dict[str, Row]:
    """The setting with the least validation, relative to each task's least and averaged over the tasks that have all
    settings on common seeds."""
    every = {task.name: rows_of(plan, task, (name,)) for task in plan.tasks}
    rows = {task: found for task, found in every.items() if common_seeds(found) and not any(r.failed for r in found)}
    if not rows:
        return {}
    costs = np.array([[row.validation(common_seeds(found)) for row in found] for found in rows.values()])
    one = int(np.argmin((costs / costs.min(axis=1, keepdims=True)).mean(axis=0)))
    return {task: found[one] for task, found in rows.items()}


def _named(name: str, rows: dict[str, Row]) -> str:
    """With the setting that is the one for all."""
    return f"{name} ({next(iter(rows.values())).arm.setting})" if name.startswith(ONE) else name


def _without_largest(scores: Scores) -> float:
    rest = np.arange(len(scores.tokens)) != scores.tokens.argmax()
    return float(Scores(scores.nats[:, rest], scores.tokens[rest]).bits_per_token.mean())
