"""Evidence without training: records as a run would leave them."""

from functools import partial

import pytest

from research.comparison.evidence import Evidence, Spec
from research.comparison.protocol import (
    FAMILY,
    FIXED,
    ISOLATING,
    NONE,
    OTHER_LAWS,
    PI,
    PI_SWEPT,
    STOPPED,
    Protocol,
    Task,
)


@pytest.fixture(scope="session")
def protocol() -> Protocol:
    """Two tasks, two rates, and every kind of dependency."""
    return Protocol(
        name="small",
        tasks=(Task("first", "stdlib-docs", 1024, 4), Task("second", "stdlib-source", 1024, 4)),
        arms=(NONE, STOPPED, FIXED[2], PI, *ISOLATING, *OTHER_LAWS),
        seeds=(0, 1, 2),
        rates=(1e-3, 2e-3),
        tuned={"none": NONE, "stopped": STOPPED, FAMILY: FIXED[2]},
        headline=("none", "early-stopping", "fixed", "pi"),
        swept_pi=PI_SWEPT[1:3],
        first_seeds=2,
        selection_task="first",
    )


@pytest.fixture
def evidence(tmp_path) -> Evidence:
    return Evidence(tmp_path / "runs")


def finish_run(evidence: Evidence, spec: Spec, validation=6.0, nats=None, tokens=(10, 20, 30)) -> dict:
    """Adds the record of a run as if it had been done, and returns it."""
    nats = nats or [validation * count for count in tokens]
    lam = spec.settings.get("control.lambda_init", 0.0)
    record = {
        "key": spec.key,
        "task": spec.task.name,
        "arm": spec.arm,
        "setting": spec.setting,
        "seed": spec.seed,
        "settings": spec.settings,
        "failed": None,
        "steps": 8,
        "tokens": 8192,
        "n_tokens": 1024,
        "validation": {"final": validation, "best": validation, "best_step": 8},
        "test": {"tokens": list(tokens), "final": nats, "best": nats},
        "law": {"lambda_init": 0.5},
        "training": {"final": 6.0, "tokens": 1024},
        "ticks": {"step": [4, 8], "s": [0.1, 0.2], "lambda": [lam + spec.seed, 0.1], "data_bpt": [6.0, 5.0]},
        "cpu_time_s": 60.0 if spec.settings["control.controller"] == "none" else 90.0,
        "wall_time_s": 100.0,
    }
    evidence.add(record, spec.file.name)
    return record


def lose(evidence: Evidence, arm: str, seeds=(0, 1, 2), setting: str | None = None) -> None:
    """Have runs of the second task end as one that diverges."""
    for key, record in evidence.records.items():
        meant = (record["arm"], record["task"]) == (arm, "second") and setting in (None, record["setting"])
        if meant and record["seed"] in seeds:
            lost = {name: value for name, value in record.items() if name not in ("test", "validation", "ticks")}
            evidence.records[key] = {**lost, "failed": "not finite"}


@pytest.fixture
def finish(evidence):
    return partial(finish_run, evidence)
