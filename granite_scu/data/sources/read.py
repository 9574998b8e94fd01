"""Read a corpus: files of text or records, folders and patterns of them, an embedded corpus, or the hub's."""

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DEFAULT_DATASET, HUB_PREFIX, DataConfig
from granite_scu.data.sources import files, formats, hub, samples
from granite_scu.data.sources.corpora import EMBEDDED
from granite_scu.data.sources.documents import SPLITS, Document, TextFile
from granite_scu.data.sources.record_formats import AUTO

_SUPPORTED = f"{', '.join(formats.SUFFIXES[:-1])} or {formats.SUFFIXES[-1]}"
_REMEDY = (
    f"give a {_SUPPORTED} file, also as {' or '.join(files.PACKED)}, a folder or pattern of them, or an embedded "
    f"corpus ({', '.join(EMBEDDED)}), or {HUB_PREFIX}owner/name for a data set of the hub"
)
_HELD_OUT = dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "--validation-data") | {"test": "--test-data"}
"""Files beside one for training that are not trained on, by what their names or folders say, and the flag for each."""
_LEARNED = ("train", "training")
_NAMED = 3
"""Files that are named of each part, where they are not more."""
_NO_WORDS = {"of", *(suffix.removeprefix(".") for suffix in (*formats.SUFFIXES, *files.PACKED))}
"""Words of names that say nothing of a part: of ``00000-of-00001``, and suffixes."""
ABOUT = ("README", "LICENSE", "LICENCE", "NOTICE", "CITATION", "DATASET_INFO", "DATASET_INFOS", "DATASET_DICT")
"""Names of texts, and of JSON, that beside records or above them tell of these, and are not what is to be learned."""

_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Something that documents come from.

    Attributes:
        read: gives them.
        files: those of the user's that they are in; None where they are in none.
        split: that the documents are of; empty where they are to be divided.
    """

    read: Callable[[], Iterable[Document | TextFile]]
    files: list[Path] | None = None
    split: str = ""


def sources_of(config: DataConfig) -> list[Source]:
    """All that a run reads, one after the other: each source, or each split of a corpus that comes divided; then what
    is validated and tested on, where that has files of its own.

    Files are listed now, so that every reading of them is like the first.

    Raises:
        UserError: nothing there, or the hub does not have it.
    """
    path, *others = config.sources or [DEFAULT_DATASET]
    alone = hub.is_on_hub(path) and not (others or config.files)
    if alone and (splits := hub.published(path, config.text_column, config.record_format, config.stream)):
        if config.held_out_share is not None:
            raise UserError(
                f"--held-out-share {config.held_out_share:g}: {config.named} comes in splits of its own; leave it out"
            )
        return [Source(read, split=name) for name, read in zip(SPLITS, splits, strict=True)]
    how = config.text_column, config.encoding, config.record_format, config.stream
    found = [source(name, *how) for name in (path, *others)]
    _check_once("--data-dir", config.sources, found)
    if divided := _divided([file for each in found for file in each.files or ()], by_train=False):
        _log.warning("--data-dir %s: %s", config.named, divided)  # whoever names each file may want it
    if config.files:
        _check_splits(config)
    for split, (flag, names) in config.files.items():
        with named_by(flag):
            of_split = [source(name, *how, split) for name in names]
        _check_once(flag, names, of_split)
        found += [Source(partial(_read_by_name, flag, each.read), each.files, split) for each in of_split]
    return found


def _check_once(flag: str, names: Sequence[str], found: Sequence[Source]) -> None:
    """Refuse a file that two names of a flag stand for, as one that is named twice: it would be read twice."""
    read: dict[str, str] = {}
    for name, each in zip(names, found, strict=False):  # the hub's default has no name
        for file in each.files or ():
            other = read.setdefault(os.path.realpath(file), name)
            if other != name:
                raise UserError(f"{flag} {name}: {file} is in {other} too; name it once")


def _check_splits(config: DataConfig) -> None:
    """Refuse a data set of the hub of which two flags would read the same split."""
    read: dict[tuple[str, str], str] = {}
    for wanted, (flag, names) in {"train": ("--data-dir", config.sources or [DEFAULT_DATASET]), **config.files}.items():
        for name in filter(hub.is_on_hub, names):
            with named_by(flag):
                split = hub.split_of(name, wanted, config.stream)
            other = read.setdefault((name, split), flag)
            if other != flag:
                raise UserError(
                    f"{flag} {name}: has no {wanted} split, and {other} reads its {split} split; name another data "
                    "set, or leave it out"
                )


def _read_by_name(flag: str, read: Callable[[], Iterable[Document | TextFile]]) -> Iterator[Document | TextFile]:
    with named_by(flag):
        yield from read()


@contextmanager
def named_by(flag: str) -> Iterator[None]:
    """Say of a text that is refused which flag has named it, where that is another than ``--data-dir``."""
    try:
        yield
    except UserError as error:
        error.args = (str(error).replace("--data-dir", flag),)  # itself, for the exit code goes by its cause
        raise


def source(
    path: str,
    text_column: str,
    encoding: str = "utf-8",
    record_format: str = AUTO,
    streamed: bool = False,
    split: str = "train",
) -> Source:
    """One source; its documents come in a fixed order and one at a time: of a large source little is in memory.

    Args:
        path: file, folder (searched in depth, sorted), pattern such as ``logs/**/*.jsonl.gz``, embedded corpus, or data
            set of the hub.
        text_column: field of a record that holds the text.
        encoding: of text files.
        record_format: as in ``DataConfig``.
        streamed: keep no copy of what comes from the hub.
        split: that is read of a data set of the hub, where it has it.

    Raises:
        UserError: nothing there; when it is read, a file that cannot be read; names file and line or byte.
    """
    if path in EMBEDDED:
        return Source(EMBEDDED[path])
    if hub.is_on_hub(path):
        return Source(partial(hub.read, path, text_column, record_format, streamed, split))
    listed = readable_files(path)
    return Source(partial(_read_files, listed, text_column, encoding, record_format), listed)


def is_path(source: str) -> bool:
    """Whether a source is the user's own, and neither an embedded corpus nor the hub's."""
    return source not in EMBEDDED and not hub.is_on_hub(source)


def load(path: str, text_column: str, encoding: str = "utf-8", record_format: str = AUTO) -> list[Document]:
    """As ``in_memory``, of one source. Raises UserError as ``source``, and where no text is in it."""
    documents = in_memory(source(path, text_column, encoding, record_format).read())
    if not documents:
        raise no_text([path])
    return documents


def in_memory(documents: Iterable[Document | TextFile], wanted: Set[str] | None = None) -> list[Document]:
    """The documents with text, files of text with theirs; the number of those without any is logged.

    Args:
        documents: as they are read.
        wanted: digests of the only ones that are kept; None keeps all.
    """
    kept, empty, n = [], [], 0
    for n, each in enumerate(documents, 1):  # noqa: B007
        document = each if isinstance(each, Document) else Document(each.name, each.text)
        if not document.text.strip():
            empty.append(document.name)
        elif wanted is None or document.digest in wanted:
            kept.append(document)
    if 0 < len(empty) < n:  # if all are empty, the refusal says so
        _log.warning("left out %d of %d texts, which are empty; the first is %s", len(empty), n, empty[0])
    return kept


def no_text(paths: Sequence[str]) -> UserError:
    """What a corpus without any text gets."""
    return UserError(f"--data-dir {', '.join(paths)}: holds no text, every file or line of it is empty; {_REMEDY}")


def _read_files(
    paths: Sequence[Path], text_column: str, encoding: str, record_format: str
) -> Iterator[Document | TextFile]:
    for file in paths:
        kind = files.kind(file)
        if kind not in formats.RECORDS:
            yield TextFile(file, encoding)
            continue
        records = formats.RECORDS[kind](file, encoding, samples.columns(text_column))
        if kind == formats.PARQUET:
            records = ((place, samples.without_nulls(row)) for place, row in records)
        yield from samples.documents_of(records, text_column, record_format)


def check_readable(path: str) -> None:
    """Refuse what ``readable_files`` refuses, and read nothing."""
    if not path.strip() or not files_read(path):
        readable_files(path)


def check_beginning(path: str, text_column: str, encoding: str, record_format: str) -> None:
    """Refuse text that is there and is empty, or wrong in its first document; reads no further."""
    documents = _read_files(files_read(path), text_column, encoding, record_format)
    if not any(not isinstance(document, TextFile) or next(document.pieces(), "") for document in documents):
        raise no_text([path])


def files_read(path: str) -> list[Path]:
    """The files that a source stands for and that are read; the log does not count the others."""
    return _of_kinds_read(path, files.search(path)[0])


def _of_kinds_read(path: str, found: Iterable[Path]) -> list[Path]:
    """Those of a source's files that are text or records; of other suffixes where the path ends with it, as code does
    that is named by ``src/**/*.py``, and they hold text. Raises UserError for a folder of ``save_to_disk``."""
    if hub.is_saved(Path(path).expanduser()):
        raise UserError(
            f"--data-dir {path}: was written by save_to_disk of the datasets library; give {HUB_PREFIX}{path}"
        )
    suffix = "" if Path(path).expanduser().is_dir() else Path(path).suffix
    also = suffix if suffix and not glob.has_magic(suffix) else None
    return [
        file for file in found if files.kind(file) in formats.SUFFIXES or (file.suffix == also and files.is_text(file))
    ]


def readable_files(path: str) -> list[Path]:
    """The files of a source that are read, sorted. The log counts those of other kinds, and has those of ``ABOUT``.

    Raises:
        UserError: nothing there, nothing of a kind that can be read, or a folder that may not be read.
    """
    if not path.strip():  # an unset shell variable; Path would take it for the current folder
        raise UserError(f"--data-dir '{path}': is empty; {_REMEDY}")
    found, others = files.search(path)
    chosen = _of_kinds_read(path, found)
    others += Counter(file.suffix.lower() or "no suffix" for file in sorted({*found} - {*chosen}))
    about = _about_records(chosen)
    chosen = [file for file in chosen if file not in about]
    if divided := _divided(chosen):
        raise UserError(f"--data-dir {path}: {divided}")
    if not chosen:
        raise UserError(f"--data-dir {path}: {_why_nothing(path, others)}; {_REMEDY}")
    if others:
        listed = _listed(others)
        _log.warning("%s: skipped %d files that are hidden, linked twice or not %s: %s; a pattern with a suffix of "
                     "theirs, as 'src/**/*.py', reads text", path, others.total(), _SUPPORTED, listed)  # fmt: skip
    if about:
        _log.warning("%s: left out %s, which tells of the records beside it; to learn it, name it by itself",
                     path, ", ".join(map(str, about)))  # fmt: skip
    return chosen


def _about_records(found: Sequence[Path]) -> list[Path]:
    """The texts of a data set that tell of its records, as those of the hub have them."""
    kinds = (*formats.TEXTS, ".json")
    about = [file for file in found if files.kind(file) in kinds and file.name.partition(".")[0].upper() in ABOUT]
    records = (file for file in {*found} - {*about} if files.kind(file) in formats.RECORDS)
    folders = {folder for file in records for folder in file.parents}
    return [file for file in about if file.parent in folders]


def _divided(chosen: Sequence[Path], by_train: bool = True) -> str:
    """What is wrong with files that their names divide: what is held out there would be trained on; empty: nothing.
    Only a file for training beside them makes that sure (``by_train``); any other makes it likely."""
    parts = {file: _parts(file) for file in chosen}
    learned = {place for both in parts.values() for part, place in both
               if part in _LEARNED or not (by_train or part in _HELD_OUT)}  # fmt: skip
    held = {file: _HELD_OUT[part] for file, both in parts.items()
            for part, place in both if part in _HELD_OUT and place in learned}  # fmt: skip
    if not held:
        return ""
    flags = {file: held.get(file, "--data-dir") for file in chosen}
    given = {flag: [str(file) for file in chosen if flags[file] == flag] for flag in ("--data-dir", *held.values())}
    some = ", ".join(map(str, [*held][:_NAMED])) + (" …" if len(held) > _NAMED else "")
    how = " ".join(f"{flag} {' '.join(names) if len(names) <= _NAMED else 'FILES'}" for flag, names in given.items())
    return f"{some} beside files for training would be trained on; give {how}"


def _parts(file: Path) -> list[tuple[str, Path]]:
    """The parts of a data set that a file's name and its folder's say, and in which folder they do. Of a text, which
    may be about a test or a training, the name alone counts, and only where it says nothing else."""
    if files.kind(file) not in formats.RECORDS:
        return [(_part(file.name), file.parent)] if len(_words(file.name)) == 1 else []
    return [(_part(file.parent.name), file.parent.parent), (_part(file.name), file.parent)]


def _part(name: str) -> str:
    """The part of a data set that the first or else the last word of a name says, of a file or a folder; empty: none.

    >>> _part("chats_Test-00000-of-00001.jsonl.gz"), _part("latest.jsonl")
    ('test', '')
    """
    words = _words(name)
    return next((word for word in (*words[:1], *words[-1:]) if word in _HELD_OUT or word in _LEARNED), "")


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[.\-_ ]", name.lower()) if word.isalpha() and word not in _NO_WORDS]


def _why_nothing(path: str, others: Counter[str]) -> str:
    root = Path(path).expanduser()
    if root.is_file() and root.suffix.lower() in files.PACKED:
        return f"its name does not say what is packed in it, as chats.jsonl{root.suffix} does; unpack or rename it"
    if root.is_file():
        return f"cannot read {root.suffix or 'files without suffix'}"
    if others:
        return f"holds only other files ({_listed(others)}); a pattern with their suffix, as 'src/**/*.py', reads text"
    if root.is_dir():
        return "the folder is empty"
    return "no file matches" if glob.has_magic(path) else "no such file or folder"


def _listed(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {suffix}" for suffix, count in sorted(kinds.items()))
