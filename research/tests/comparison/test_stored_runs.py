"""Stored runs of laws that heed S are of today's code: on what they measured it sets the lambda that they had."""

import math
from dataclasses import replace

import pytest

from granite_scu.control import Measurement, build
from granite_scu.training.module import schedule
from research.comparison.evidence import Evidence
from research.comparison.protocol import FRESH, FRESH_AGAIN, FRESH_THIRD, FULL, SCARCE, VARIED
from research.laws import place_of
from research.laws.auto import AUTO, AutoSetpoint
from research.tests.comparison.test_revisions import ROOT

PLACES = {
    FULL: "comparison",
    VARIED: "varied",
    SCARCE: "scarce",
    FRESH: "fresh",
    FRESH_AGAIN: "fresh-again",
    FRESH_THIRD: "fresh-third",
}
RUNS = {protocol: ROOT / "research" / "evidence" / folder / "runs" for protocol, folder in PLACES.items()}
FEED_FORWARD = ("pi", "cascade")
"""The laws whose first lambda follows from their setpoint. That of the others was given."""
# S is stored with five digits, and scheduled gains are up to eight. What the adapter saves on a text is stored with
# five too, and the setpoint that a cascade takes from it hangs on differences of a few hundredths of a bit.
TOLERANCES = {"pi": 2e-3, "p": 2e-3, "i": 2e-3, "original": 2e-3, "cascade": 0.05, AUTO: 0.05}


def law_of(record):
    """The law that the run had."""
    name, own = controller(record), dict(record["law"])
    if name == AUTO:
        ticks = math.ceil(record["steps"] / record["settings"]["control.every"])
        return AutoSetpoint().in_a_run_of(ticks, validations=0)
    if name in FEED_FORWARD:
        del own["lambda_init"]
    return build(place_of(name), **own)


def controller(record):
    """Its name; that of PI whose setpoint held-out text moves is ``auto``."""
    auto = record["settings"].get("control.target_s") == AUTO
    return AUTO if auto else record["settings"]["control.controller"]


def travels(record):
    """The summed learning rates up to each tick."""
    asked, steps = record["settings"], record["steps"]
    peak, course, warmup = (asked[f"optimizer.{name}"] for name in ("learning_rate", "schedule", "warmup_steps"))
    rates = [peak * schedule(step, course, warmup, steps) for step in range(steps)]
    return [math.fsum(rates[:step]) for step in record["ticks"]["step"]]


def measurements(record):
    ticks = record["ticks"]
    for k, (s, data_bpt, lr_sum) in enumerate(zip(ticks["s"], ticks["data_bpt"], travels(record), strict=True)):
        sensed = {name: ticks[name][k] for name in ticks if name.startswith(("saved_", "savings_"))}
        param_bpt = s / (1 - s) * data_bpt
        yield Measurement(s, data_bpt, param_bpt, lr_sum=lr_sum, sensed={} if None in sensed.values() else sensed)


def deviation(record):
    """The largest |ln(lambda today / lambda then)| of a run's ticks.

    What is rounded away in a record may lie on a threshold of the law: either side of it will do.
    """
    law, worst = law_of(record), 0.0
    doubts = [law.doubt * share for share in (1, 0.99, 1.01)] if isinstance(law, AutoSetpoint) else []
    nearly, state = [replace(law, doubt=doubt) for doubt in doubts] or [law], law.init()
    for measured, then in zip(measurements(record), record["ticks"]["lambda"], strict=True):
        found = [each.update(state, measured) for each in nearly]
        state, output = min(found, key=lambda pair: abs(math.log(pair[1].lam / then)))
        worst = max(worst, abs(math.log(output.lam / then)))
    return worst


@pytest.mark.parametrize(
    ("folder", "task"),
    [pytest.param(folder, task.name, id=task.name) for protocol, folder in RUNS.items() for task in protocol.tasks],
)
def test_todays_law_sets_the_lambda_that_the_run_had(folder, task):
    records = [r for r in Evidence(folder) if r["task"] == task and not r["failed"] and controller(r) in TOLERANCES]
    assert records
    assert {r["key"]: deviation(r) for r in records if deviation(r) > TOLERANCES[controller(r)]} == {}
