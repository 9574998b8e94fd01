"""Whether what the repository publishes of the comparison is what its own runs give."""

import json
from pathlib import Path

import pytest

from granite_scu.comparison import report, results
from granite_scu.comparison.evidence import Evidence
from granite_scu.comparison.plan import Plan
from granite_scu.comparison.protocol import FULL

DOCS = Path(__file__).parents[2] / "docs"
AGAIN = "not what docs/evidence/runs give: scripts/compare_controllers.py --report-only --write-docs"


def published() -> str:
    return (DOCS / "evidence" / "comparison.md").read_text(encoding="utf-8")


def test_the_page_and_the_files_say_the_same(tmp_path):
    results_found = json.loads((DOCS / "evidence" / "comparison.json").read_text(encoding="utf-8"))
    assert report.markdown(results_found) == published()
    page = tmp_path / "evidence.md"
    page.write_text((DOCS / "evidence.md").read_text(encoding="utf-8"), encoding="utf-8")
    report.write_docs(results_found, page)
    assert page.read_text(encoding="utf-8") == (DOCS / "evidence.md").read_text(encoding="utf-8"), AGAIN


@pytest.mark.slow
def test_what_is_published_is_what_the_runs_give():
    """To the letter: the bootstrap's draws are seeded, and the figures rounded."""
    found = results.report(Plan(FULL, Evidence(DOCS / "evidence" / "runs")))
    assert report.markdown(found) == published(), AGAIN
