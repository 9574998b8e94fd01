from research.comparison import data
from research.comparison.package_docs import docstrings, package_docs


def test_package_docs_are_numpys_docstrings_and_not_its_code():
    documents = {document.name: document.text for document in package_docs()}
    assert len(documents) > 50
    sums = documents["numpy/lib/_function_base_impl.py"]
    assert "Compute the weighted average along the specified axis." in sums and "def average(" not in sums
    assert not any("/tests/" in name for name in documents)


def test_it_is_read_by_its_name_and_can_be_divided():
    assert data.place_of("package-docs") == "package-docs"
    division, _ = data.read("package-docs", "tiny-granite-h", 128)
    assert all(len(division.parts[name]) >= 3 for name in ("validation", "test"))


def test_docstrings_come_in_the_order_of_the_source():
    source = '"""One."""\nclass A:\n    """Two."""\n    def f(self):\n        """Three."""\ndef g():\n    """Four."""\n'
    assert list(docstrings(source)) == ["One.", "Two.", "Three.", "Four."]
