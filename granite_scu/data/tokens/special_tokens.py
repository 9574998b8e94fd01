"""Control tokens in what people wrote, such as ``<|end_of_text|>``: text, unless they are asked for as tokens.

A tokenizer takes them for its own wherever they stand. Read as text, nobody's words end a document or begin a turn.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.data.sources.documents import ASSISTANT, Conversation, with_texts

THINKING = ("<think>", "</think>")
"""Around what a model thinks before it answers; in an answer of the assistant's they are the template's to see."""

Places = tuple[tuple[int, int], ...]
"""Characters of a text, [start, stop) each."""

ReadAs = Literal["text", "tokens", "refuse"]
"""What becomes of control tokens that somebody wrote."""


def placeholders(said: Any) -> Iterator[str]:
    """Characters for private use that do not occur in what JSON can hold."""
    text = json.dumps(said, ensure_ascii=False, default=str)
    return (sign for sign in map(chr, chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))) if sign not in text)


class EscapedChat(NamedTuple):
    """A conversation in which every control token that somebody wrote is one private character.

    Attributes:
        conversation: what a template renders.
        behind: the control token that each of the characters stands for.
        count: how many there were.
        first: the first of them; empty where there was none.
    """

    conversation: Conversation
    behind: dict[str, str]
    count: int
    first: str

    def restored(self, text: str, spans: Places | None) -> tuple[str, Places | None, Places]:
        """A rendered text, and the characters of it that are supervised, with the control tokens in their places.

        Returns:
            Text, spans, and where the control tokens are.
        """
        if not self.behind:
            return text, spans, ()
        signs = [(match.start(), self.behind[match[0]]) for match in re.finditer(_any_of(self.behind), text)]
        grown = [0, *accumulate(len(token) - 1 for _, token in signs)]
        places = [place for place, _ in signs]

        def moved(place: int) -> int:
            return place + grown[bisect_left(places, place)]

        return (
            re.sub(_any_of(self.behind), lambda match: self.behind[match[0]], text),
            spans and tuple((moved(start), moved(stop)) for start, stop in spans),
            tuple((moved(place), moved(place) + len(token)) for place, token in signs),
        )


class SpecialTokens:
    """The control tokens of a tokenizer, and what becomes of those that people wrote.

    Args:
        tokenizer: its special tokens are meant.
        read_as: what becomes of them; "refuse" raises UserError at the first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, read_as: ReadAs = "text") -> None:
        self.read_as = read_as
        self._tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._unknown = tokenizer.unk_token
        self._pattern = re.compile(_any_of(self._tokens))
        self._are_shown = all(token == repr(token)[1:-1] for token in self._tokens)

    def places(self, text: str, name: str) -> Places:
        """Where control tokens stand in a text that somebody wrote, ``name`` in messages."""
        found = tuple(match.span() for match in self._pattern.finditer(text))
        if found and self.read_as == "refuse":
            raise _refusal(name, text[slice(*found[0])])
        return found

    def first_in(self, text: str) -> str:
        """The first one of a text; empty where there is none."""
        found = self._pattern.search(text)
        return found[0] if found else ""

    def words(self, text: str) -> str:
        """What a text says besides control tokens."""
        return self._pattern.sub("", text).strip()

    def made_by(self, tokens: Sequence[str]) -> str | None:
        """A control token that a text was turned into although it was to stay text; None where all is well."""
        return next((token for token in tokens if token in self._tokens and token != self._unknown), None)

    def escape(self, conversation: Conversation) -> EscapedChat:
        """The conversation with private characters for the control tokens in it, unless these are read as tokens."""
        said = [conversation.messages, conversation.tools]
        # Python's way to write messages shows every text, and is fast.
        if self._are_shown and not self._pattern.search(str(said)):
            return EscapedChat(conversation, {}, 0, "")
        free, found, signs = placeholders(said), [], {}  # type: ignore[var-annotated]

        def escaped(text: str, kept: tuple[str, ...] = ()) -> str:
            def sign(match: re.Match[str]) -> str:
                token = match[0]
                if token in kept:
                    return token
                found.append(token)
                if self.read_as == "tokens":
                    return token
                signs[token] = signs.get(token) or next(free)
                return signs[token]

            return self._pattern.sub(sign, text)

        messages = tuple(
            with_texts(message, partial(escaped, kept=THINKING if message["role"] == ASSISTANT else ()))
            for message in conversation.messages
        )
        tools = with_texts(conversation.tools, escaped)
        if found and self.read_as == "refuse":
            raise _refusal(conversation.name, found[0])
        without = replace(conversation, messages=messages, tools=tools)
        return EscapedChat(without, {sign: token for token, sign in signs.items()}, len(found), next(iter(found), ""))


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of any of them, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def _refusal(name: str, token: str) -> UserError:
    return UserError(
        f"--control-tokens refuse: {name} holds the control token {token}; take it out, or choose text, which reads it "
        "as any other word"
    )
