"""Whether what the repository publishes of the comparison is what its own runs give."""

import json
from pathlib import Path

import pytest

from research.comparison import report, results
from research.comparison.evidence import Evidence
from research.comparison.plan import Plan
from research.comparison.protocol import FRESH, FRESH_AGAIN, FRESH_THIRD, FULL, SCARCE, VARIED

EVIDENCE = Path(__file__).parents[2] / "evidence"
AGAIN = "not what runs.jsonl beside it gives: scripts/compare_controllers.py {} --report-only"
PUBLISHED = {
    "comparison": (FULL, ""),
    "varied": (VARIED, "--varied"),
    "scarce": (SCARCE, "--scarce"),
    "fresh": (FRESH, "--fresh"),
    "fresh-again": (FRESH_AGAIN, "--fresh-again"),
    "fresh-third": (FRESH_THIRD, "--fresh-third"),
}


def published(folder: str, name: str = "comparison.md") -> str:
    return (EVIDENCE / folder / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", PUBLISHED)
def test_what_is_published_is_what_the_runs_give(folder):
    """To the letter: the bootstrap's draws are seeded, and the figures rounded."""
    protocol, flag = PUBLISHED[folder]
    found = results.report(Plan(protocol, Evidence(EVIDENCE / folder / "runs")))
    assert report.markdown(found) == published(folder), AGAIN.format(flag)


def test_a_rate_is_compared_with_early_stopping_at_the_same_rate():
    """One figure of the table by hand: nats of the best validated adapters, of two runs on the same test text."""
    nats = {}
    for line in published("fresh-third", "runs.jsonl").splitlines():
        run = json.loads(line)
        settings = run["settings"]
        if run["task"] == "cpp-once" and run["seed"] == 0 and settings.get("optimizer.learning_rate") == 0.008:
            nats[settings["control.controller"], settings.get("control.target_s")] = sum(run["test"]["best"])
    by_hand = nats["pi", "auto"] / nats["none", None] - 1
    rows = results.report(Plan(FRESH_THIRD, Evidence(EVIDENCE / "fresh-third" / "runs")))["rates"]
    (row,) = (row for row in rows if row["learning_rate"] == 0.008)
    assert row["excess"]["cpp-once"] == pytest.approx(by_hand, rel=1e-6) and by_hand < -0.005
