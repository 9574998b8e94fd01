"""Read a corpus: text files, jsonl, folders of them, an embedded corpus, or wikitext-2 from the hub."""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from granite_scu.data.corpora import EMBEDDED, load_embedded
from granite_scu.data.documents import Document
from granite_scu.data.splits import Split
from granite_scu.errors import UserError

SUFFIXES = (".txt", ".md", ".jsonl")
"""Files that can be read: the first two hold one document each, the last one document a line."""

_SUPPORTED = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
_REMEDY = f"give a {_SUPPORTED} file, a folder of them, or an embedded corpus ({', '.join(EMBEDDED)})"
# An article's title stands between single equals signs, a section's between more of them.
_ARTICLE_TITLE = re.compile(r" = (?!=)(.*[^=\s]) = \n?")

_log = logging.getLogger(__name__)


def load(path: str | None, text_column: str) -> list[Document]:
    """The documents of a corpus, in a fixed order; texts that are empty are among them (see ``drop_empty``).

    Args:
        path: file, folder (searched in depth, sorted) or embedded corpus; None takes wikitext-2 from the hub.
        text_column: field of a jsonl line that holds the text.

    Raises:
        UserError: nothing there, no text in it, or a file that cannot be read; names file and line or byte.
    """
    if path is None:
        published = load_wikitext()
        return [*published.train, *published.validation, *published.test]
    if path in EMBEDDED:
        return load_embedded(path)
    if not path.strip():  # an unset shell variable; Path would take it for the current folder
        raise UserError(f"--data-dir '{path}': is empty; {_REMEDY}")
    try:
        files = _files(Path(path).expanduser())
        documents = [document for file in files for document in _read(file, text_column)]
    except OSError as error:
        place = error.filename or path
        raise UserError(f"--data-dir {place}: cannot be read ({error.strerror}); check its permissions") from error
    if not any(document.text.strip() for document in documents):
        raise UserError(f"--data-dir {path}: holds no text, every file or line of it is empty; {_REMEDY}")
    return documents


def load_wikitext() -> Split[list[Document]]:
    """Wikitext-2 (raw) from the Hugging Face hub, one document an article, in the splits it was published with.

    Raises:
        UserError: it is neither cached nor can the hub be reached.
    """
    import datasets  # takes a second, and only the hub needs it

    try:
        hub = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
    except OSError as error:  # what datasets raises when offline and when it finds nothing: both are OSErrors
        raise UserError(
            f"no --data-dir, and wikitext-2 cannot be had from the hub ({str(error).splitlines()[0]}); "
            f"check the network, or take an embedded corpus: {' or '.join(f'--data-dir {name}' for name in EMBEDDED)}"
        ) from error
    train, validation, test = (
        _articles(f"wikitext/{name}", hub[name]["text"]) for name in ("train", "validation", "test")
    )
    return Split(train, validation, test)


def drop_empty(documents: list[Document]) -> tuple[list[Document], int]:
    """The documents with text, and the number of those without any, which is logged too."""
    kept = [document for document in documents if document.text.strip()]
    n_empty = len(documents) - len(kept)
    if n_empty:
        first = next(document.name for document in documents if not document.text.strip())
        _log.warning("left out %d of %d texts, which are empty; the first is %s", n_empty, len(documents), first)
    return kept, n_empty


def _files(root: Path) -> list[Path]:
    """The files of a corpus that can be read, sorted. Those of other kinds in a folder are counted in the log."""
    if root.is_file():
        if root.suffix.lower() not in SUFFIXES:
            raise UserError(f"--data-dir {root}: cannot read {root.suffix or 'files without suffix'}; {_REMEDY}")
        return [root]
    if not root.is_dir():
        what = "neither a file nor a folder" if root.exists() else "no such file or folder"
        raise UserError(f"--data-dir {root}: {what}; {_REMEDY}")
    # os.walk, since Path.rglob passes over a folder that it may not read.
    found = sorted(Path(folder) / name for folder, _, names in os.walk(root, onerror=_raise) for name in names)
    files = [file for file in found if file.suffix.lower() in SUFFIXES]
    others = Counter(file.suffix.lower() or "no suffix" for file in found if file.suffix.lower() not in SUFFIXES)
    listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
    if not files:
        what = f"holds only other files ({listed})" if others else "the folder is empty"
        raise UserError(f"--data-dir {root}: {what}; {_REMEDY}")
    if others:
        _log.warning("%s: skipped %d files that are not %s: %s", root, others.total(), _SUPPORTED, listed)
    return files


def _raise(error: OSError) -> NoReturn:
    raise error


def _read(file: Path, column: str) -> list[Document]:
    text = _decoded(file)
    if file.suffix.lower() != ".jsonl":
        return [Document(str(file), text)]
    # Not splitlines(), which also splits at U+2028 and its like: JSON may hold those inside a string.
    lines = enumerate(text.split("\n"), start=1)
    places = ((f"{file}:{number}", line) for number, line in lines if line.strip())
    return [Document(place, _text_of(line, column, place)) for place, line in places]


def _decoded(file: Path) -> str:
    data = file.read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"--data-dir {file}: byte {error.start} (line {line}) is not valid UTF-8; "
            "convert the file, for example with iconv -f latin1 -t utf-8"
        ) from error


def _text_of(line: str, column: str, place: str) -> str:
    """The text of a jsonl line; ``place`` is its file and number, for messages."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"--data-dir {place}: not valid JSON ({reason}); each line must be one JSON object") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise UserError(f'--data-dir {place}: a {kind}, not an object; each line must be one, as {{"{column}": "..."}}')
    if "messages" in record and (column not in record or column == "messages"):
        raise UserError(f"--data-dir {place}: chat data (messages) is not supported yet; give lines with a text field")
    if column not in record:
        fields = ", ".join(record) or "none"
        raise UserError(f"--data-dir {place}: no field {column!r}, there are: {fields}; name one with --text-column")
    text = record[column]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise UserError(f"--data-dir {place}: field {column!r} is a {kind}, not text; name another with --text-column")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which is no character
        raise UserError(
            f"--data-dir {place}: field {column!r} holds a lone surrogate at character {error.start}; "
            "mend or remove the line"
        ) from error
    return text


def _articles(name: str, lines: Iterable[str]) -> list[Document]:
    """Wikitext's lines joined into articles, each from its title to the next. Blank lines before the first go."""
    articles: list[tuple[str, list[str]]] = [("start", [])]
    for line in lines:
        if title := _ARTICLE_TITLE.fullmatch(line):
            articles.append((title[1], []))
        articles[-1][1].append(line)
    joined = (Document(f"{name}/{title}", "".join(parts)) for title, parts in articles)
    return [document for document in joined if document.text.strip()]
