"""Whether what the repository publishes of the comparison is what its own runs give."""

import json
from pathlib import Path

import pytest

from granite_scu.experiments.comparison import report, results
from granite_scu.experiments.comparison.evidence import Evidence
from granite_scu.experiments.comparison.plan import Plan
from granite_scu.experiments.comparison.protocol import FULL, VARIED

DOCS = Path(__file__).parents[3] / "docs"
AGAIN = "not what docs/evidence/runs give: scripts/compare_controllers.py --report-only --write-docs"
VARIED_AGAIN = "not what docs/evidence/varied/runs give: scripts/compare_controllers.py --varied --report-only"


def published(folder: str) -> str:
    return (DOCS / folder / "comparison.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", ["evidence", "evidence/varied"])
def test_table_and_json_say_the_same(folder):
    found = json.loads((DOCS / folder / "comparison.json").read_text(encoding="utf-8"))
    assert report.markdown(found) == published(folder)


def test_the_page_says_what_the_files_say(tmp_path):
    page = tmp_path / "evidence.md"
    page.write_text((DOCS / "evidence.md").read_text(encoding="utf-8"), encoding="utf-8")
    report.write_docs(json.loads((DOCS / "evidence" / "comparison.json").read_text(encoding="utf-8")), page)
    assert page.read_text(encoding="utf-8") == (DOCS / "evidence.md").read_text(encoding="utf-8"), AGAIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "folder", "again"), [(FULL, "evidence", AGAIN), (VARIED, "evidence/varied", VARIED_AGAIN)]
)
def test_what_is_published_is_what_the_runs_give(protocol, folder, again):
    """To the letter: the bootstrap's draws are seeded, and the figures rounded."""
    found = results.report(Plan(protocol, Evidence(DOCS / folder / "runs")))
    assert report.markdown(found) == published(folder), again
