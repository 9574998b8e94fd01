"""From a document to pieces: the texts that are tokenised at once."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from granite_scu.config.errors import UserError
from granite_scu.data.sources.documents import Conversation, Document, Fingerprint, TextFile
from granite_scu.data.sources.record_formats import TEXT
from granite_scu.data.tokens.special_tokens import Places

_log = logging.getLogger(__name__)

LIMIT = 1_000_000
"""Characters after which a text is cut wherever that is: what is tokenised at once takes a hundred times its size."""
LONGEST_CHAT = 2_000_000
"""Characters of a conversation, which is always tokenised at once."""

# A newline between a visible character and a letter or digit, and the end of a word. Tokenizers of Granite's kind never
# join what stands on its two sides, so that a long text cut here gives the tokens it gives as a whole.
_LINE_END = r"(?<=\S)\n(?=[^\W_])"
_WORD_END = r"(?<=[^\W\d_])(?=[ ,.;:!?\u3001\u3002\uff0c\uff1b\uff1a\uff01\uff1f])"
_CUT = re.compile(_LINE_END)
_CUT_LATE = re.compile(f"{_LINE_END}|{_WORD_END}")
_CUT_LAST = re.compile(r"(?<=[^\W\d_])(?=\d)")
"""Between a letter and a digit, which such tokenizers never join either: where base64 and its like can be cut."""


class Piece(NamedTuple):
    """A text that is tokenised at once: a document or some of it.

    Attributes:
        text: what is tokenised; of a conversation as the chat template has rendered it.
        name: of the document.
        spans: characters that are supervised, [start, stop) each; None supervises all, and the end of text.
        written: control tokens in it that somebody wrote and that are read as text.
        n_control: control tokens that somebody wrote, however they are read.
        first_control: the first of them; empty where there is none.
        n_without_reasoning: answers of which the chat template leaves out what was thought.
        has_system: whether it is a conversation with a system turn of its own.
        is_conversation: whether it came as messages.
        is_begun: whether the document begins as the tokenizer begins a text; a chat template writes its own.
        is_ended: whether the end of text follows its last piece.
        is_first: whether the document begins with it.
        is_last: whether the document ends with it.
        fingerprint: of the document, up to this piece; None of a question, which is none.
        source: number of what the document came from.
        record_format: that the document was read by; empty of a question.
    """

    text: str
    name: str
    spans: Places | None = None
    written: Places = ()
    n_control: int = 0
    first_control: str = ""
    n_without_reasoning: int = 0
    has_system: bool = False
    is_conversation: bool = False
    is_begun: bool = True
    is_ended: bool = True
    is_first: bool = True
    is_last: bool = True
    fingerprint: Fingerprint | None = None
    source: int = 0
    record_format: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing stands in the document."""
        return self.is_first and self.is_last and not self.text.strip()


def pieces_of(
    document: Document | TextFile,
    source: int,
    render: Callable[[Conversation], Piece],
    split_seed: int,
    least: int,
) -> Iterator[Piece]:
    """The document's text: where it is long, in pieces of ``least`` to about twice as many characters; a
    conversation always as a whole, as ``render`` makes it.

    Raises:
        UserError: a conversation that is too long for that, or what reading and rendering raise.
    """
    fingerprint = Fingerprint(split_seed)
    if isinstance(document, Conversation):
        fingerprint.update(document.text, document.words, document.question)
        piece = render(document) if document.text else Piece("", document.name, is_conversation=True)
        if len(piece.text) > LONGEST_CHAT:
            raise UserError(
                f"--data-dir {document.name}: a conversation of {len(piece.text):,} characters, which is tokenised as "
                f"a whole; divide it into several of at most {LONGEST_CHAT:,}"
            )
        yield piece._replace(fingerprint=fingerprint, source=source, record_format=document.record_format)
        return
    whole = Piece("", document.name, fingerprint=fingerprint, source=source, record_format=TEXT)
    text, begin, searched, is_first = "", 0, least, True
    for more in document.pieces():
        fingerprint.update(more)
        text, begin = text[begin:] + more, 0
        while cut := _cut(text, begin, searched, least) or _forced_cut(text, begin, least, document.name):
            yield whole._replace(text=text[begin:cut], is_first=is_first, is_last=False)
            begin, searched, is_first = cut, least, False
        searched = max(least, len(text) - begin - 2)
    yield whole._replace(text=text[begin:], is_first=is_first)


def _cut(text: str, begin: int, searched: int, least: int) -> int | None:
    """Where a long text is cut next: behind a line, or where the lines are long behind a word.

    Args:
        text: as far as it is read.
        begin: of what is not cut yet.
        searched: characters from there on in which there is no place to cut.
        least: characters of a piece.
    """
    latest = 2 * least
    found = _CUT.search(text, begin + searched, begin + latest)
    if found is None and len(text) >= begin + latest:
        late = searched if searched > latest else least
        found = _CUT_LATE.search(text, begin + late, begin + max(latest, LIMIT))
    return found.end() if found else None


def _forced_cut(text: str, begin: int, least: int, name: str) -> int | None:
    """Where a text is cut in which no line and no word ends: for now nowhere, if it is short enough."""
    limit = begin + max(2 * least, LIMIT)
    if len(text) <= limit:
        return None
    if found := _CUT_LAST.search(text, (begin + limit) // 2, limit):
        return found.end()
    _log.warning("%s: no line and no word ends in %d characters; it is cut there, within a token", name, limit - begin)
    return limit


def groups_of(pieces: Iterable[Piece], least: int, whole: bool = False) -> Iterator[list[Piece]]:
    """The pieces in groups of so many characters or some more; ``whole`` lets each group end with a document."""
    group: list[Piece] = []
    length = 0
    for piece in pieces:
        group.append(piece)
        length += len(piece.text)
        if length >= least and (piece.is_last or not whole):
            yield group
            group, length = [], 0
    if group:
        yield group
