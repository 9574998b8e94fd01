"""Whether what the repository publishes of the comparison is what its own runs give."""

import json
from pathlib import Path

import pytest

from granite_scu.experiments.comparison import report, results
from granite_scu.experiments.comparison.evidence import Evidence
from granite_scu.experiments.comparison.plan import Plan
from granite_scu.experiments.comparison.protocol import FRESH, FRESH_AGAIN, FULL, SCARCE, VARIED

EVIDENCE = Path(__file__).parents[3] / "evidence"
AGAIN = "not what runs.jsonl beside it gives: scripts/compare_controllers.py {} --report-only"
PUBLISHED = {
    "comparison": (FULL, ""),
    "varied": (VARIED, "--varied"),
    "scarce": (SCARCE, "--scarce"),
    "fresh": (FRESH, "--fresh"),
    "fresh-again": (FRESH_AGAIN, "--fresh-again"),
}


def published(folder: str) -> str:
    return (EVIDENCE / folder / "comparison.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", PUBLISHED)
def test_table_and_json_say_the_same(folder):
    found = json.loads((EVIDENCE / folder / "comparison.json").read_text(encoding="utf-8"))
    assert report.markdown(found) == published(folder)


@pytest.mark.slow
@pytest.mark.parametrize("folder", PUBLISHED)
def test_what_is_published_is_what_the_runs_give(folder):
    """To the letter: the bootstrap's draws are seeded, and the figures rounded."""
    protocol, flag = PUBLISHED[folder]
    found = results.report(Plan(protocol, Evidence(EVIDENCE / folder / "runs")))
    assert report.markdown(found) == published(folder), AGAIN.format(flag)
