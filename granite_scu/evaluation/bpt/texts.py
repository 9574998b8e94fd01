"""Which texts are scored: those that the user names, or those that the run held out; never what a run has seen."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TEXTS, DataConfig, from_record, last_part, listed
from granite_scu.data.sources.documents import Conversation, Document
from granite_scu.data.sources.read import in_memory, is_path, load, named_by, sources_of
from granite_scu.data.streaming import beginning
from granite_scu.data.tokens.special_tokens import ReadAs
from granite_scu.storage.run_folder import DOCUMENTS, TRAINING_CONFIG, read_json
from granite_scu.storage.working_folder import as_seen_from_here

_log = logging.getLogger(__name__)

SEEN = ("train", "validation", "shared")
"""Splits of a run that have had a part in it: validation chose the best adapter."""


@dataclass(frozen=True)
class Texts:
    """Documents to be scored, not yet tokenised.

    Attributes:
        name: what the user calls them.
        documents: in order.
        excluded: how many were left out because a run had seen them.
        tail_of: the run's data settings, where only the blocks held out at the end of the documents are meant.
        special_tokens: what becomes of those that somebody wrote.
        loss_on: what of a chat counts, as in ``DataConfig``.
    """

    name: str
    documents: list[Document]
    excluded: int = 0
    tail_of: DataConfig | None = None
    special_tokens: ReadAs = "text"
    loss_on: str = DataConfig.loss_on

    @property
    def has_chats(self) -> bool:
        return any(isinstance(document, Conversation) for document in self.documents)


def named(
    path: str, column: str, encoding: str, record_format: str, runs: Sequence[Path], flag: str = "--data-dir"
) -> Texts:
    """The documents of a file, folder or embedded corpus that no run has seen.

    Args:
        path: the corpus.
        column: field of a record that holds the text.
        encoding, record_format: as in ``DataConfig``.
        runs: run folders.
        flag: that named the corpus, for messages.

    Raises:
        UserError: nothing to read, or nothing that no run has seen.
    """
    with named_by(flag):
        documents = load(path, column, encoding, record_format)
    return _unseen(path, documents, runs, flag)


def held_out(run: Path, others: Sequence[Path], splits: Sequence[str] = ("test",)) -> Texts:
    """The run's own test documents; where it was divided by block, its test blocks.

    Args:
        run: the run folder.
        others: run folders that are scored too; what they have seen is left out.
        splits: whose documents are wanted.

    Raises:
        UserError: the run's text is gone or has changed since.
    """
    record = documents_of(run)
    config = data_config(run)
    name = f"{', '.join(map(last_part, config.tested))}, {_part_of(config, run.name)}"
    read = beginning(config) if config.stream else [source.read() for source in sources_of(config)]
    others = [other for other in others if documents_of(other) != record]
    if record["shared"]:
        documents = in_memory(chain(*read))
        if [document.digest for document in documents] != record["shared"]:
            raise _changed(run, config.named)
        if _seen_by(others) & set(record["shared"]):
            raise UserError(f"{run}: another run named here was trained on what it held out; give --data-dir")
        return Texts(name, documents, tail_of=config)
    wanted = {digest for split in splits for digest in record[split]}
    if not wanted:
        raise UserError(f"{run}: held nothing out (--held-out-share 0); give --data-dir with other text")
    found = in_memory(chain(*read), wanted)
    if not found:
        raise _changed(run, config.named)
    missing = len(wanted - {document.digest for document in found})
    if missing:
        _log.warning("%d of the %d held-out documents are no longer in %s", missing, len(wanted), config.named)
    return _unseen(name, found, others, "the run's own text")


def _part_of(config: DataConfig, run: str) -> str:
    """What the text that a run tests on is to it."""
    if config.doubles:
        return f"by which {run} chose its adapter"
    return f"the test text of {run}" if "test" in config.files else f"held out by {run}"


def data_config(run: Path) -> DataConfig:
    """The data settings of a run, its paths as this process finds them."""
    config = from_record(DataConfig, read_json(run / TRAINING_CONFIG).get("data", {}))
    found = {
        name: [as_seen_from_here(source, run) if is_path(source) else source for source in listed(value)]
        for name in TEXTS
        if (value := getattr(config, name)) is not None
    }
    return replace(config, **found)


def _unseen(name: str, documents: list[Document], runs: Sequence[Path], flag: str) -> Texts:
    seen = _seen_by(runs)
    kept = [document for document in documents if document.digest not in seen]
    if not kept:
        holds_out = any(set(documents_of(run)["test"]) - seen for run in runs)
        or_leave_out = ", or leave --data-dir out to score what the run held out" if holds_out else ""
        raise UserError(
            f"{flag} {name}: a run was trained or validated on every document of it; give text that it has not "
            f"seen{or_leave_out}"
        )
    return Texts(name, kept, len(documents) - len(kept))


def _seen_by(runs: Sequence[Path]) -> set[str]:
    """Digests of the documents that had a part in a run."""
    seen: set[str] = set()
    for run in runs:
        record = documents_of(run)
        if record.get("streamed"):
            _log.warning("%s was trained on a stream: what it has read is not known, and is not left out", run)
        seen.update(*(record[split] for split in SEEN))
    return seen


def _changed(run: Path, text: str) -> UserError:
    return UserError(f"{run}: its text {text} has changed since, and what it held out is gone; give --data-dir")


def documents_of(run: Path) -> dict[str, Any]:
    """The digests of a run's documents. Raises UserError where their file is missing or damaged."""
    return read_json(run / DOCUMENTS)
