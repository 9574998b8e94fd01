from granite_scu.data.sources import corpora
from granite_scu.data.sources.corpora import held_out_source, is_held_out, stdlib_docs


def package_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def test_docs_are_prose_in_more_than_50_documents():
    documents = stdlib_docs()
    assert len(documents) > 50
    assert all(document.text.strip() for document in documents)
    assert "statement" in next(d.text for d in documents if d.name == "topics/while")


def test_all_that_is_held_out_is_of_packages_that_are():
    kept = held_out_source()
    assert kept and all(is_held_out(package_of(document.name)) for document in kept)


def test_whether_a_package_is_held_out_depends_on_its_name_alone(monkeypatch, tmp_path):
    kept = {package_of(document.name) for document in held_out_source()}
    for package in ("json", "email", *kept):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "other.py").write_text(f"# another {package}\n")
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path))
    assert {package_of(document.name) for document in held_out_source()} == kept


def test_these_packages_are_held_out_for_good():
    """The embedded model was pretrained without them: a change of the hash would leak."""
    names = ("argparse", "asyncio", "ast", "collections", "email", "json", "logging", "unittest", "xml")
    assert [name for name in names if is_held_out(name)] == ["collections", "email", "logging"]
