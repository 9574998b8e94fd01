"""Whether what the repository publishes of the comparison is what its own runs give."""

import json
from pathlib import Path

import pytest

from granite_scu.experiments.comparison import report, results
from granite_scu.experiments.comparison.evidence import Evidence
from granite_scu.experiments.comparison.plan import Plan
from granite_scu.experiments.comparison.protocol import FRESH, FULL, SCARCE, VARIED

ROOT = Path(__file__).parents[3]
EVIDENCE, DOCS = ROOT / "evidence", ROOT / "docs"
AGAIN = "not what runs.jsonl beside it gives: scripts/compare_controllers.py {} --report-only"
PUBLISHED = [
    (FULL, "comparison", "--write-docs"),
    (VARIED, "varied", "--varied"),
    (SCARCE, "scarce", "--scarce"),
    (FRESH, "fresh", "--fresh --write-docs"),
]


def published(folder: str) -> str:
    return (EVIDENCE / folder / "comparison.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", ["comparison", "varied", "scarce", "fresh"])
def test_table_and_json_say_the_same(folder):
    found = json.loads((EVIDENCE / folder / "comparison.json").read_text(encoding="utf-8"))
    assert report.markdown(found) == published(folder)


@pytest.mark.parametrize(("protocol", "folder", "flags"), [each for each in PUBLISHED if each[0].page])
def test_the_page_says_what_the_files_say(protocol, folder, flags, tmp_path):
    text, page = (DOCS / protocol.page).read_text(encoding="utf-8"), tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    report.write_docs(json.loads((EVIDENCE / folder / "comparison.json").read_text(encoding="utf-8")), page)
    assert page.read_text(encoding="utf-8") == text, AGAIN.format(flags)


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "folder", "flags"), PUBLISHED)
def test_what_is_published_is_what_the_runs_give(protocol, folder, flags):
    """To the letter: the bootstrap's draws are seeded, and the figures rounded."""
    found = results.report(Plan(protocol, Evidence(EVIDENCE / folder / "runs")))
    assert report.markdown(found) == published(folder), AGAIN.format(flags)
