"""The text of a run, tokenised: from its sources, or from what was kept of an earlier run on the same text."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.data.sources import files, samples
from granite_scu.data.sources.documents import Document, TextFile
from granite_scu.data.sources.read import Source, is_path, named_by, no_text, sources_of
from granite_scu.data.sources.record_formats import TEXT, in_words
from granite_scu.data.tokens import cache
from granite_scu.data.tokens.chat import DAY, Renderer
from granite_scu.data.tokens.encoding import backend_of, encoded, with_progress_bar
from granite_scu.data.tokens.stream import Corpus
from granite_scu.storage.kept import cache_folder

SAID_APART = 8
"""Sources of which each has a line about how it was read; of more there is one line for all."""

_log = logging.getLogger(__name__)


def prepare(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    show_progress: bool = True,
    sources: Sequence[Source] | None = None,
) -> Corpus:
    """The tokens of a run's text, made in constant memory whatever its size.

    Args:
        config: the sources, and how they are read. A data set that comes divided has its three splits as sources.
        tokenizer: of the model.
        show_progress: show a bar on stderr when the text is long.
        sources: what ``sources_of`` has found; None looks for them.

    Raises:
        UserError: nothing to read, a file that cannot be read, or no place to keep the tokens.
    """
    every = [*config.sources, *(name for _, names in config.files.values() for name in names)]
    names = [os.path.abspath(Path(name).expanduser()) if is_path(name) else name for name in every]  # from any folder
    sources = sources_of(config) if sources is None else sources
    before = _stamps(sources)
    flags = [config.named_for(source.split)[0] for source in sources]
    digests = [_digest(source, flag) for source, flag in zip(sources, flags, strict=True)]
    facts = {
        "sources": names,
        "settings": [
            *(config.text_column, config.record_format, config.encoding),
            *(config.loss_on, config.control_tokens, config.split_seed),
        ],
        "tokenizer": _identity(tokenizer),
        "contents": [digest for digest, _ in digests],
    }
    folder = Path(config.cache_dir).expanduser() if config.cache_dir else cache_folder()
    renderer = Renderer(tokenizer, config.loss_on, config.control_tokens)

    def make(done: int) -> Iterator[Corpus]:
        if done:
            _log.info("continuing the interrupted tokenisation of %s", config.named)
        parts = encoded([source.read() for source in sources], renderer, config.split_seed, done, flags)
        yield from with_progress_bar(parts, sum(size for _, size in digests) if show_progress else 0)
        if _stamps(sources) != before:  # what was read is then not what the tokens are kept under the name of
            raise UserError(f"--data-dir {config.named}: changed while it was read; start again when it is complete")

    found = cache.prepared(folder, facts, make, 1 + max(tokenizer.get_vocab().values()))
    if not found.n_documents:
        raise no_text(config.sources)
    check_documents(config, found, tokenizer, every if 1 < len(sources) == len(every) <= SAID_APART else ())
    return found


def check_documents(
    config: DataConfig, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, apart: Sequence[str] = ()
) -> None:
    """Report what is not learned unchanged and, unless all are texts, how records were read: what was meant otherwise
    shows before anything is trained. Refuse a ``--text-column`` that no record has a text in.

    Args:
        config: how they were read.
        corpus: all of them.
        tokenizer: of the model.
        apart: names of the sources, each of which gets a line; without them there is one line for all.
    """
    column, text = config.text_column, config.named
    if column not in (DataConfig.text_column, samples.MESSAGES) and corpus.n_conversations == corpus.n_documents:
        raise UserError(
            f"--text-column {column}: no record of {text} has a text in it, all are conversations; leave it "
            "out, or correct its name"
        )
    n_empty, n_control = corpus.counts["empty"], corpus.counts["control"]
    if n_empty:
        counts = n_empty, n_empty + corpus.n_documents
        _log.warning("left out %d of %d texts, which are empty; the first is %s", *counts, corpus.firsts["empty"])
    if n_control:
        _log.warning(
            "control tokens that somebody wrote: %d, the first is %s; they are read as %s (--control-tokens)",
            *(n_control, corpus.firsts["control"], config.control_tokens),
        )
    if n_without_reasoning := corpus.counts["reasoning"]:
        _log.warning("the chat template leaves out what was thought before %d of the answers", n_without_reasoning)
    if n_within := corpus.counts["within"]:
        thinks = "enable_thinking" in str(tokenizer.chat_template)
        remedy = "give --chat-template-args enable_thinking=false" if thinks else "end prompts without white space"
        _log.warning(
            "answers that begin within a token: %d; their prompt alone ends in another one than was trained on; %s",
            *(n_within, remedy),
        )
    if config.system and (n_system := corpus.counts["system"]):
        counts = n_system, corpus.n_conversations
        _log.info("--system: %d of %d conversations have a system turn of their own and keep it", *counts)
    for flag, given in (("--chat-template", config.chat_template), ("--system", config.system)):
        if given and not corpus.n_conversations:
            _log.warning("%s %s: %s holds no conversation to use it for", flag, given, text)
    every = corpus.record_formats()
    if every.keys() - {TEXT}:
        by_source = [(name, corpus.record_formats(number)) for number, name in enumerate(apart)]
        for name, counts in by_source or [("", every)]:
            if counts:
                words = in_words(counts, has_template=tokenizer.chat_template is not None)
                _log.info(f"{name}: {words}" if name else words)
    if corpus.n_conversations and "strftime_now" in str(tokenizer.chat_template):
        _log.info("the chat template may write the date; it gets %s, the same on every day", f"{DAY:%d %B %Y}")


def _stamps(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """Size and time of change of each of the user's files; whoever reads them reports what is wrong with them."""
    try:
        found = [file.stat() for source in sources for file in source.files or ()]
    except OSError:
        return []
    return [(each.st_size, each.st_mtime_ns) for each in found]


def _digest(source: Source, flag: str) -> tuple[str, int]:
    """A digest of all that a source holds, and its size in bytes."""
    with named_by(flag):
        return _read_through(source.read()) if source.files is None else _contents(source.files)


def _contents(listed: list[Path]) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    for file in listed:
        of_file = hashlib.sha256()
        with files.opened(file, as_it_is=True) as stream:
            while data := stream.read(files.PIECE):
                of_file.update(data)
                size += len(data)
        digest.update(os.fsencode(os.path.abspath(file)) + f"\0{of_file.hexdigest()}\0".encode())
    return digest.hexdigest(), size


def _read_through(documents: Iterable[Document | TextFile]) -> tuple[str, int]:
    """As ``_contents``, of what is in no files of the user's."""
    digest, size = hashlib.sha256(), 0
    for document in documents:
        # All of a message may reach the template, and its text is only what was said.
        facts = (document.name, document.text, getattr(document, "messages", ()))
        digest.update("\0".join(map(str, facts)).encode(errors="backslashreplace") + b"\0")
        size += len(document.text)
    return digest.hexdigest(), size


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """By which a tokenizer is known: another vocabulary, merge or template is another."""
    facts = [backend_of(tokenizer).to_str(), tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
