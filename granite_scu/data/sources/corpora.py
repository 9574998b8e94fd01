"""The embedded corpora: text that every Python installation carries, so that a run needs no download.

``stdlib-docs``    the English documentation in ``pydoc_data.topics``: prose about Python.
``stdlib-source``  the source code of the standard-library packages that the embedded model has
                   never seen: a fifth of them, chosen by a hash of the package's name.

The other four fifths are the corpus the embedded model was pretrained on (``research/pretrain_tiny.py``).
"""

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from granite_scu.config.errors import UserError
from granite_scu.data.sources.documents import Document

_LEFT_OUT = {"test", "tests", "idle_test", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
_CODEC_TABLE = '""" Python Character Mapping Codec'  # generated tables of numbers, 1.3 MB of them: no language
_HELD_OUT_ONE_IN = 5


def stdlib_docs() -> list[Document]:
    """The language documentation that ``help()`` shows, one document a topic.

    Raises:
        UserError: this Python was installed without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            "this Python has no pydoc_data (a minimal build), so the corpus stdlib-docs is missing; "
            "name your own text with --data-dir, or use a full Python installation"
        ) from error
    return [Document(f"topics/{name}", text) for name, text in sorted(topics.items())]


def held_out_source() -> list[Document]:
    """The standard-library source that the embedded model has never seen."""
    return [document for package, document in library_source() if is_held_out(package)]


def is_held_out(package: str) -> bool:
    """Whether a top-level package or module is kept from pretraining. Depends on its name alone."""
    return hashlib.sha256(package.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0


def library_source() -> Iterator[tuple[str, Document]]:
    """(top-level package, document) for each module of the running interpreter's library, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        text = _utf8_text(path) if _LEFT_OUT.isdisjoint(relative.parts) else ""
        if text.strip() and not text.lstrip().startswith(_CODEC_TABLE):
            yield relative.parts[0].removesuffix(".py"), Document(relative.as_posix(), text)


def _utf8_text(path: Path) -> str:
    """The file's text; nothing for the few library modules that declare another encoding."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


EMBEDDED: dict[str, Callable[[], list[Document]]] = {
    "stdlib-docs": stdlib_docs,
    "stdlib-source": held_out_source,
}
"""What gives the documents of each embedded corpus, in a fixed order."""
