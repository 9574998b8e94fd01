"""Whether what the repository publishes of the comparison is what its own runs give."""

import json
from pathlib import Path

import pytest

from granite_scu.experiments.comparison import report, results
from granite_scu.experiments.comparison.evidence import Evidence
from granite_scu.experiments.comparison.plan import Plan
from granite_scu.experiments.comparison.protocol import FULL, VARIED

ROOT = Path(__file__).parents[3]
EVIDENCE, PAGE = ROOT / "evidence", ROOT / "docs" / "evidence.md"
AGAIN = "not what evidence/comparison/runs.jsonl gives: scripts/compare_controllers.py --report-only --write-docs"
VARIED_AGAIN = "not what evidence/varied/runs.jsonl gives: scripts/compare_controllers.py --varied --report-only"


def published(folder: str) -> str:
    return (EVIDENCE / folder / "comparison.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", ["comparison", "varied"])
def test_table_and_json_say_the_same(folder):
    found = json.loads((EVIDENCE / folder / "comparison.json").read_text(encoding="utf-8"))
    assert report.markdown(found) == published(folder)


def test_the_page_says_what_the_files_say(tmp_path):
    page = tmp_path / "evidence.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    report.write_docs(json.loads((EVIDENCE / "comparison" / "comparison.json").read_text(encoding="utf-8")), page)
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), AGAIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "folder", "again"), [(FULL, "comparison", AGAIN), (VARIED, "varied", VARIED_AGAIN)]
)
def test_what_is_published_is_what_the_runs_give(protocol, folder, again):
    """To the letter: the bootstrap's draws are seeded, and the figures rounded."""
    found = results.report(Plan(protocol, Evidence(EVIDENCE / folder / "runs")))
    assert report.markdown(found) == published(folder), again
