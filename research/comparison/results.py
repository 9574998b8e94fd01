"""What the finished runs say: a row for each arm of each task, and the headline claim."""

import math
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np

from granite_scu.evaluation import statistics
from granite_scu.evaluation.statistics import Estimate
from research.comparison import bootstrap
from research.comparison.evidence import Evidence
from research.comparison.overview import overview
from research.comparison.pairs import pairs
from research.comparison.plan import Plan
from research.comparison.protocol import CASCADE, PI, Arm, Protocol, Task
from research.comparison.rates import rates
from research.comparison.rows import (
    STOPPED_SWEEP,
    SWEEP,
    SWEEPS,
    Row,
    best_of,
    best_of_each_arm,
    best_of_sweep,
    decides,
    mean_of_known,
    row_of,
    rows_of,
    scores_of,
)
from research.comparison.success import success
from research.comparison.transfer import constants, priors, transfer

MARGIN = 0.002
"""The claim: PI comes within this share of the bits per token of the swept best lambda ..."""
TOKEN_SHARE = 0.2
"""... with this share of the sweep's tokens."""

CLAIMANTS = {"pi": PI, "cascade": CASCADE}
"""What is claimed of PI at the chosen S* is asked of the law that needs none, too."""


def report(plan: Plan) -> dict[str, Any]:
    """All results, ready for JSON."""
    plan.evidence.require_one_text()
    setpoint, provisional = _setpoint(plan)
    tasks = [found for task in plan.tasks if (found := _task(plan, task, setpoint))]
    judged = [task.name for task in plan.protocol.tasks if task.name != plan.protocol.selection_task]
    return {
        "protocol": plan.protocol.name,
        "selection_task": plan.protocol.selection_task,
        "setpoint": setpoint,
        "setpoint_is_provisional": provisional,
        "draws": statistics.DRAWS,
        "level": statistics.LEVEL,
        "tasks": tasks,
        "claims": {name: _overall(name, judged, tasks) for name in _claimants(plan)},
        "cost": _cost(plan.protocol),
        "overview": overview(plan, tasks),
        "success": success(plan),
        "seeds": len(plan.protocol.seeds),
        "pairs": pairs(plan),
        "rates": rates(plan),
        "transfer": transfer(plan),
        "constants": constants(plan),
        "priors": priors(plan),
        "runs": len(plan.evidence.records),
        "runs_of_the_protocol": len({spec.key for spec in plan.specs() if spec} & set(plan.evidence.records)),
        "machines": sorted({record["machine"]["cpu"] for record in plan.evidence if "machine" in record}),
        "versions": _versions(plan.evidence),
        "revisions": len({record.get("git_revision") for record in plan.evidence}),
    }


def _claimants(plan: Plan) -> dict[str, Arm]:
    """None where the protocol claims nothing."""
    return CLAIMANTS if plan.protocol.selection_task else {}


def _versions(evidence: Evidence) -> dict[str, list[str]]:
    """Of each library the versions that runs were done with; those that a record does not name are left out."""
    found: dict[str, set[str]] = {}
    for record in evidence:
        for name, version in record.get("versions", {}).items():
            found.setdefault(name, set()).add(version)
    return {name: sorted(versions) for name, versions in found.items()}


def _setpoint(plan: Plan) -> tuple[float | None, bool]:
    """S*, and whether it was chosen before all runs that choose it are there; None where no S* is set."""
    if plan.protocol.selection_task is None:
        return None, False
    if (setpoint := plan.setpoint()) is not None:
        return setpoint, False
    best = best_of([row_of(plan, plan.protocol.selection, arm) for arm in plan.protocol.swept_pi])
    return (float(best.arm.settings["control.target_s"]) if best else None), True


def _task(plan: Plan, task: Task, setpoint: float | None) -> dict[str, Any] | None:
    every = [row for arm in plan.arms if (row := row_of(plan, task, arm)).begun]
    if not every:
        return None
    shown = [replace(row, name=f"pi (S* = {setpoint:g})") if row.arm is PI else row for row in best_of_each_arm(every)]
    reference = _reference(shown, plan.protocol.judged)
    swept = best_of_sweep(plan, task, SWEEP)  # over the seeds that the whole sweep has
    best = {row.arm.name: row for row in shown} | {n: best_of_sweep(plan, task, arms) for n, arms in SWEEPS.items()}
    excess = {name: row and _swept_excess(row, swept) for name, row in best.items()}
    shown = [row for row in shown if row is reference or row.is_not(reference)]
    base = plan.evidence.get(plan.base(task))
    return {
        "name": task.name,
        "corpora": [corpus for corpus in (task.corpus, task.then) if corpus],
        "test_documents": len(base["test"]["tokens"]) if base else None,
        "test_tokens": sum(base["test"]["tokens"]) if base else None,
        "base_bpt": scores_of([base]).bits_per_token.item() if base else None,
        "reference": reference.name if reference else None,
        "swept_excess": excess,
        "rows": [_as_json(row, reference, swept) for row in shown],
        "settings": [_as_json(row, reference, swept) for row in every],
        "claims": {
            name: _claim(plan, task, row) for name, arm in _claimants(plan).items() for row in shown if row.arm is arm
        },
    }


def _reference(shown: list[Row], judged: str) -> Row | None:
    """What the other rows are compared with: the arm that is judged or PI, or else the first arm that has a score."""
    scored = sorted((row for row in shown if row.records), key=lambda row: (row.arm.name != judged, row.arm is not PI))
    return scored[0] if scored else None


def _swept_excess(row: Row, swept: Row | None) -> float | None:
    """Test bits over those of the swept best, minus 1, on the seeds that both have."""
    shared = [seed for seed in sorted(row.records) if swept and seed in swept.records]
    if not shared or swept is None:
        return None
    return float(row.scores(shared).bits_per_token.mean() / swept.scores(shared).bits_per_token.mean() - 1)


def _as_json(row: Row, reference: Row | None, swept: Row | None) -> dict[str, Any]:
    seeds = sorted(row.records)
    shared = [seed for seed in seeds if reference and seed in reference.records]
    scores = row.scores(seeds) if seeds else None
    is_reference = reference is not None and row.arm is reference.arm
    paired = None
    if len(shared) > 1 and reference and not is_reference:
        paired = bootstrap.difference(row.scores(shared), reference.scores(shared))
    ends = [record["ticks"] for record in row.records.values()]
    return {
        "name": row.name,
        "arm": row.arm.name,
        "setting": row.arm.setting,
        "adapter": row.arm.adapter,
        "is_reference": is_reference,
        "seeds": seeds,
        "failed_seeds": row.failed,
        "learning_rates": sorted({record["settings"]["optimizer.learning_rate"] for record in row.records.values()}),
        "validation_bpt": row.validation(seeds) if seeds else None,
        "test_bpt": asdict(bootstrap.mean(scores)) if scores else None,
        "test_bpt_of_seeds": [round(x, 6) for x in scores.bits_per_token.tolist()] if scores else [],
        "test_bpt_best_adapter": float(row.scores(seeds, "best").bits_per_token.mean()) if seeds else None,
        "difference": _dict(paired),
        "swept_excess": _swept_excess(row, swept),
        "decided": decides(len(shared)),
        "verdict": _verdict(row.name, reference.name, paired, len(shared)) if paired and reference else None,
        "s_at_end": mean_of_known([ticks["s"][-1] for ticks in ends]),
        "lambda_at_end": mean_of_known([ticks["lambda"][-1] for ticks in ends]),
    }


def _verdict(arm: str, reference: str, paired: Estimate, seeds: int) -> str:
    if not decides(seeds):
        return f"two seeds decide nothing between {arm} and {reference} ({paired.mean:+.4f} bits/token)"
    interval = f"nominal 95 % interval {paired.low:+.4f} to {paired.high:+.4f}"
    if math.isnan(paired.low):
        interval = "too few documents for an interval"
    if not paired.differs:
        return f"no difference shown between {arm} and {reference} ({paired.mean:+.4f} bits/token, {interval})"
    word = "worse" if paired.mean > 0 else "better"
    return f"{arm} is {word} than {reference} by {abs(paired.mean):.4f} bits/token ({interval})"


def _claim(plan: Plan, task: Task, claimant: Row) -> dict[str, Any] | None:
    """An arm against this task's swept best lambda; and against that one lambda, chosen where S* was.

    None until every place of the protocol's sweep, and the arm, are finished for a common seed. Places that lost a seed
    to a failure are none of the best.
    """
    sweep = rows_of(plan, task, SWEEP)
    seeds = [seed for seed in plan.seeds if all(row.has_finished(seed) for row in (*sweep, claimant))]
    best = best_of(sweep, seeds)
    if best is None:
        return None
    stopped = best_of(rows_of(plan, task, STOPPED_SWEEP), seeds)
    elsewhere = best_of_sweep(plan, plan.protocol.selection, SWEEP)
    carried = next((row for row in sweep if elsewhere and row.arm is elsewhere.arm and not row.failed), None)

    def over(reference: Row | None, row: Row | None = claimant) -> Estimate | None:
        if row is None or reference is None or row.failed:
            return None
        return bootstrap.relative_excess(row.scores(seeds), reference.scores(seeds))

    excess = over(best)
    found = outcome(excess, len(seeds))
    return {
        "task": task.name,
        "swept_best": best.arm.label,
        "sweep_runs": len(sweep),
        "seeds": seeds,
        "excess": _dict(excess),
        "outcome": found,
        "stopped_best": stopped.arm.label if stopped else None,
        "stopped_excess": _dict(over(stopped)),
        "carried_lambda": carried.arm.label if carried else None,
        "carried_lambda_excess": _dict(over(best, carried)),
        "statement": _statement(task.name, claimant.name, excess, found, best.arm.label, len(seeds)),
    }


def _dict(estimate: Estimate | None) -> dict[str, float] | None:
    return asdict(estimate) if estimate else None


Outcome = Literal["shown", "refuted", "open"]


def outcome(excess: Estimate | None, seeds: int) -> Outcome:
    """Whether a task shows the claim: the whole interval within the margin, or beyond it; a failed run refutes it."""
    if excess is None:
        return "refuted"
    if not decides(seeds):
        return "open"
    return "refuted" if excess.low > MARGIN else "shown" if excess.high <= MARGIN else "open"


def _statement(task: str, arm: str, excess: Estimate | None, found: Outcome, best: str, seeds: int) -> str:
    """One sentence on a task."""
    if excess is None:
        return f"{task}: the claim does not hold: a run of {arm} failed"
    word = {"shown": "holds", "refuted": "does not hold", "open": "is not decided"}[found]
    return (
        f"{task}: the claim {word}: {arm} is at {excess.mean:+.2%} of the swept best ({best}), nominal 95 % interval "
        f"{excess.low:+.2%} to {excess.high:+.2%}, {seeds} seed{'s' * (seeds > 1)}"
    )


def _overall(claimant: str, names: list[str], tasks: list[dict]) -> dict[str, Any]:
    """The claim over these tasks, all but the one on which S* was chosen: it holds when every one shows it."""
    claims = {task["name"]: claim for task in tasks if (claim := task["claims"].get(claimant))}
    outcomes = [claims[name]["outcome"] if name in claims else "not run" for name in names]
    verdict = "refuted" if "refuted" in outcomes else "shown" if set(outcomes) == {"shown"} else "open"
    found: dict[str, Any] = {}
    for kind in ("", "stopped_", "carried_lambda_"):
        excesses = [e["mean"] for name in names if name in claims and (e := claims[name][f"{kind}excess"])]
        found[f"{kind}mean_excess"] = float(np.mean(excesses)) if excesses else None
        found[f"{kind}worst_excess"] = max(excesses, default=None)
    counts = {word: outcomes.count(word) for word in ("shown", "refuted", "open", "not run")}
    return {"margin": MARGIN, "outcome": verdict, "tasks": counts, **found}


def _cost(protocol: Protocol) -> dict[str, Any]:
    """Runs that a user of a new task pays for PI and for the sweep; they are equally long, so these are tokens too.

    The share follows from the design and is no finding. Two ways to count: the search for lambda alone, with the
    learning rate known; and with the rates tried, as here: every rate once on one constant lambda, whose best both
    take, and for the sweep once more on lambda = 0. The runs at the rates taken are places of the sweep; PI's run comes
    on top.
    """
    sweep, rates = len({arm.label for arm in protocol.arms if arm.name in SWEEP}), len(protocol.rates)
    return {
        "sweep_runs": sweep,
        "share": 1 / sweep,
        "with_rates": (1 + (rates if rates > 1 else 0)) / (sweep + 2 * (rates - 1)),
        "goal": TOKEN_SHARE,
        "choosing_setpoint_runs": len(protocol.swept_pi) * len(protocol.seeds[: protocol.first_seeds]),
    }
