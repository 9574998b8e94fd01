"""Links of the documents to files of this repository lead somewhere. The standard library and pytest alone."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "docs", ROOT / "notes", ROOT / "research")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *(path for folder in FOLDERS for path in sorted(folder.rglob("*.md")))]
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """The targets of links and pictures, without those in code and those that lead to the web."""
    found = re.findall(r"\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)", re.sub(r"`[^`\n]*`", "", _FENCED.sub("", text)))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """What the headings are called in links: as GitHub does, lower case, spaces as hyphens, other signs left out."""
    headings = re.findall(r"^#+ +(.*?) *$", _FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(document):
    broken = []
    for target in links(document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)
    assert not broken


def test_a_link_and_the_heading_it_leads_to_are_recognised():
    text = '# Same seed, *same* bytes\n[here](a.md#b) ![shown](c.png "title") `[no](code)` [web](https://x.org)\n'
    assert links(text) == ["a.md#b", "c.png"]
    assert anchors(text) == {"same-seed-same-bytes"}
