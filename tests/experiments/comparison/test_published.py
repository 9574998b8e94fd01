"""Whether what the repository publishes of the comparison is what its own runs give."""

import json
from pathlib import Path

import pytest

from granite_scu.experiments.comparison import report, results
from granite_scu.experiments.comparison.evidence import Evidence
from granite_scu.experiments.comparison.plan import Plan
from granite_scu.experiments.comparison.protocol import FRESH, FRESH_AGAIN, FRESH_THIRD, FULL, SCARCE, VARIED
from granite_scu.storage.run_folder import as_json

EVIDENCE = Path(__file__).parents[3] / "evidence"
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
def test_table_and_json_say_the_same(folder):
    found = json.loads(published(folder, "comparison.json"))
    assert report.markdown(found) == published(folder)


@pytest.mark.slow
@pytest.mark.parametrize("folder", PUBLISHED)
def test_what_is_published_is_what_the_runs_give(folder):
    """To the letter: the bootstrap's draws are seeded, and the figures rounded."""
    protocol, flag = PUBLISHED[folder]
    found = results.report(Plan(protocol, Evidence(EVIDENCE / folder / "runs")))
    assert report.markdown(found) == published(folder), AGAIN.format(flag)
    assert as_json(found) == published(folder, "comparison.json"), AGAIN.format(flag)
