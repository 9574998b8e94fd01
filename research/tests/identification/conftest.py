"""A step test without pictures of its runs, which take a third of a short one."""

import pytest

from granite_scu.data.sources.corpora import stdlib_docs
from granite_scu.export import present


@pytest.fixture(autouse=True)
def _no_pictures_of_runs(monkeypatch):
    monkeypatch.setattr(present, "picture", lambda folder: None)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A short text file of prose about Python, some five thousand tokens."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("\n\n".join(document.text for document in stdlib_docs())[:20_000], encoding="utf-8")
    return path
