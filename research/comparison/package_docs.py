"""The corpus ``package-docs``: the docstrings of numpy, which every installation of the product has: reference prose
about arrays with examples, one document a module. It varies with numpy's version."""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy

from granite_scu.data.sources.documents import Document

NAME = "package-docs"
SHORTEST = 1000
"""Characters of docstrings that make a module a text."""


def package_docs() -> list[Document]:
    """The docstrings of numpy's modules, one document a module, sorted by path; a text that recurs stands once."""
    root = Path(numpy.__path__[0])
    seen: set[str] = set()
    documents = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root.parent)
        if "tests" not in relative.parts:
            new = [text for text in docstrings(path.read_text(encoding="utf-8")) if text not in seen]
            seen.update(new)
            text = "\n\n".join(new)
            if len(text) >= SHORTEST:
                documents.append(Document(relative.as_posix(), text))
    return documents


def docstrings(source: str) -> Iterator[str]:
    """Every docstring of a module, in the order of its source."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text:
            yield text
