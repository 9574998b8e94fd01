"""Data sets of the Hugging Face hub, through the datasets library: ``hf:owner/name`` or ``hf:owner/name:config``."""

import logging
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from granite_scu.config import hub
from granite_scu.config.errors import UserError, one_line
from granite_scu.config.settings import DEFAULT_DATASET, HUB_PREFIX
from granite_scu.data.sources import samples
from granite_scu.data.sources.corpora import EMBEDDED
from granite_scu.data.sources.documents import SPLITS, Document
from granite_scu.data.sources.record_formats import AUTO

_log = logging.getLogger(__name__)

# An article's title stands between single equals signs, a section's between more of them.
_ARTICLE_TITLE = re.compile(r" = (?!=)(.*[^=\s]) = \n?")


_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""Of a data set on the hub. Of anything else the library thinks that it is a folder, and says that the hub lacks it."""


def is_on_hub(source: str) -> bool:
    """Whether a source is meant to come from the hub."""
    return source.startswith(HUB_PREFIX)


def is_saved(folder: Path) -> bool:
    """Whether a folder is of the library's ``save_to_disk``."""
    marks = ("dataset_dict.json",), ("state.json", "dataset_info.json")
    return any(all((folder / name).is_file() for name in names) for names in marks)


def split_of(source: str, wanted: str = "train", streamed: bool = False) -> str:
    """The split that is read: the wanted one, where there is no such the training split, or the only one. Raises as
    ``read``."""
    found = _load(source, streamed)
    return next((name for name in (wanted, "train") if name in found), next(iter(found)))


def read(
    source: str, text_column: str, record_format: str = AUTO, streamed: bool = False, wanted: str = "train"
) -> Iterator[Document]:
    """The documents of one split, see ``split_of``.

    Args:
        source: with its prefix.
        text_column: field of a record that holds the text.
        record_format: as in ``DataConfig``.
        streamed: read it from the hub as it is needed, and keep nothing of it.
        wanted: the split.

    Raises:
        UserError: no such data set or configuration, no way to the hub, or records without what is needed.
    """
    name = split_of(source, wanted, streamed)
    if name != wanted or wanted == "train":
        _say_what_is_read(source, (name,), tuple(sorted(set(_load(source, streamed)) - {name})))
    yield from documents(source, name, text_column, record_format, streamed)


def published(source: str, text_column: str, record_format: str, streamed: bool) -> list[partial]:
    """What reads each of the three ``SPLITS`` that a data set comes in; nothing where it has not all of them.

    Raises:
        UserError: as ``read``.
    """
    found = set(_load(source, streamed))
    if not set(SPLITS) <= found:
        return []
    _say_what_is_read(source, SPLITS, tuple(sorted(found - set(SPLITS))))
    return [partial(documents, source, name, text_column, record_format, streamed) for name in SPLITS]


def documents(source: str, split: str, text_column: str, record_format: str, streamed: bool) -> Iterator[Document]:
    """The documents of a split, one a row; of wikitext, whose rows are lines, one an article. Raises as ``read``."""
    name = f"{source.removeprefix(HUB_PREFIX)}/{split}"
    rows = _rows(source, split) if streamed else _load(source, streamed)[split]
    records = ((f"{name}: row {number}", samples.without_nulls(row)) for number, row in enumerate(rows, start=1))
    found = samples.documents_of(records, text_column, record_format)
    repository, _, _ = source.removeprefix(HUB_PREFIX).partition(":")
    if repository.endswith("/wikitext") and text_column == "text":
        articles = _articles(name, (document.text for document in found))
        yield from (article for article in articles if article.text.strip())
    else:
        yield from found


def _rows(source: str, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a streamed split, all of them in each loader process that asks.

    Iterated by itself, the library's data set would hand each loader process some of its files alone, and of the
    stream, which our shares divide, the others would be missing.

    Raises:
        UserError: the hub is out of reach by now, or has a file that the library cannot read.
    """
    batches = _load(source, True)[split].iter(batch_size=1)
    for number in count(1):
        try:
            batch = next(batches, None)
        except Exception as error:  # of files, of the network, and of each library below datasets
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(
                f"--data-dir {source}: row {number} of {split} cannot be read ({reason}); check the network and the "
                "data set; where the run folder holds a checkpoint, --resume-from-checkpoint last continues from it"
            ) from error
        if batch is None:
            return
        yield {field: values[0] for field, values in batch.items()}


@lru_cache(maxsize=4)
def _load(source: str, streamed: bool = False) -> dict[str, Any]:
    """The splits of a data set by name, on the disk or, streamed, nowhere; never in memory."""
    import datasets  # takes a second, and only the hub needs it

    repository, _, configuration = source.removeprefix(HUB_PREFIX).partition(":")
    embedded = " or ".join(f"--data-dir {name}" for name in EMBEDDED)
    if not _NAME.fullmatch(repository) and not (repository and Path(repository).is_dir()):
        raise UserError(
            f"--data-dir {source}: names neither a data set of the hub nor a folder; give {HUB_PREFIX}owner/name, or "
            f"use an embedded corpus: {embedded}"
        )
    try:
        if is_saved(Path(repository)):
            saved = datasets.load_from_disk(repository)
            return saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        with hub.asked_for(repository):
            return datasets.load_dataset(repository, configuration or None, streaming=streamed)
    # Offline and not found are OSErrors, a data set that is a program a RuntimeError.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        at_bottom = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        reason = one_line(at_bottom or error)[:300]
        what = "no --data-dir, and wikitext-2" if source == DEFAULT_DATASET else f"--data-dir {source}: it"
        raise UserError(
            f"{what} cannot be had from the hub ({reason}); check the network, the name and its configuration "
            f"({HUB_PREFIX}owner/name:config), or use an embedded corpus: {embedded}"
        ) from error


@lru_cache
def _say_what_is_read(source: str, read: tuple[str, ...], unread: tuple[str, ...]) -> None:
    """Name the splits that are passed over; once, though a source is read several times."""
    if unread:
        both = ", ".join(read), ", ".join(unread)
        _log.warning("%s: of its splits %s is read, and not %s, unless for a flag of that name", source, *both)


def _articles(name: str, lines: Iterable[str]) -> Iterator[Document]:
    """Wikitext's lines joined into articles, each from its title to the next. Blank lines before the first go."""
    title, parts = "start", [""]
    for line in lines:
        if begins := _ARTICLE_TITLE.fullmatch(line):
            yield Document(f"{name}/{title}", "".join(parts))
            title, parts = begins[1], []
        parts.append(line)
    yield Document(f"{name}/{title}", "".join(parts))
