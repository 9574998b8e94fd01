"""What a corpus is made of."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from granite_scu.data.sources import files

SPLITS = ("train", "validation", "test")
"""Of a corpus: what is trained on, and what is held out."""

ASSISTANT = "assistant"
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", ASSISTANT, "tool")
"""Who may speak in a conversation."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message for the reasoning before the answer."""

WEIGHT = "weight"
"""Field of a message of the assistant's: 0 where it is not to be learned, as OpenAI's files have it."""


class Fingerprint:
    """By which a text is known again and finds its place in the split, taken as the text is read.

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int) -> None:
        self._text = hashlib.sha256()
        self._order = hashlib.sha256(f"{seed}:".encode())
        self._bare = hashlib.sha256()
        self._blank = ""  # white space that may be the end
        self._question: int | None = None
        self.characters = 0

    def update(self, text: str, said: str | None = None, question: int | None = None) -> None:
        """Take in the next part of the text, of which copies have ``said`` alone in common, and answers to the same
        question ``question``, where these are given."""
        data = text.encode()
        self._text.update(data)
        self._order.update(data)
        self.characters += len(text)
        self._question = question
        text = text if said is None else said
        body = text.rstrip()
        if body:
            self._bare.update((self._blank + body).encode())
        self._blank = text[len(body) :] if body else self._blank + text

    @property
    def digest(self) -> int:
        """The text's name, 64 bits: as ``Document.digest``."""
        return int.from_bytes(self._text.digest()[:8], "big")

    @property
    def place(self) -> int:
        """Where the text comes among all texts, 64 bits."""
        return int.from_bytes(self._order.digest()[:8], "big")

    @property
    def bare(self) -> int:
        """As ``digest``, of the text without white space at its end: copies differ in that."""
        return int.from_bytes(self._bare.digest()[:8], "big")

    @property
    def question(self) -> int:
        """As ``Document.question``."""
        return self.bare if self._question is None else self._question


@dataclass(frozen=True)
class Document:
    """One text that stands for itself: it falls into one split as a whole.

    Attributes:
        name: where it came from, for messages: a path, or path and line.
        text: its contents.
        record_format: name of the format of the record that it was; empty where it was none.
    """

    name: str
    text: str
    record_format: str = field(default="", compare=False, kw_only=True)

    @property
    def digest(self) -> str:
        """By which the text is known again: the first 16 hexadecimal digits of its SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def words(self) -> str:
        """What copies of the text have in common, but for white space at the end."""
        return self.text

    @property
    def bare(self) -> int:
        """As ``Fingerprint.bare``."""
        return _digest(self.words)

    @property
    def question(self) -> int:
        """As ``bare``, of all before the first answer, which chats share that answer it otherwise or continue it; of
        the whole where none is."""
        return self.bare

    def pieces(self) -> Iterator[str]:
        """The text in one piece or several."""
        yield self.text


@dataclass(frozen=True)
class Conversation(Document):
    """Messages that a chat template makes a text of. ``text`` is them as JSON, by which they are known again.

    Attributes:
        messages: ``role`` and ``content`` each, and what else the template knows.
        n_prompt: messages at the beginning that are not to be learned.
        tools: descriptions of what the assistant may call, as the template wants them.
        plain: prompt and completion, where these were given as texts.
    """

    messages: tuple[dict[str, Any], ...] = ()
    n_prompt: int = 0
    tools: list[Any] | None = None
    plain: tuple[str, str] | None = None

    @property
    def words(self) -> str:
        """Who says, thinks and calls what; not in which form, under which number, and whether it is to be learned."""
        return self._words_of(self.messages, self.tools)

    @property
    def question(self) -> int:
        # Not all before the last answer: records of a chat as it grew, turn by turn, would be strangers, and what is
        # held out learned from the next. Chats that merely greet alike are on one side too, which does no harm unless
        # most do: ``splitting`` then goes by the whole text. Nor what a system turn says, as a date or a name, or which
        # tools there are: the same question and answer would be on both sides.
        asking = (number for number in self.said if any(map(_asks, self.messages[:number])))
        first = next(asking, None)
        if first is None:
            return self.bare
        asked = [message for message in self.messages[:first] if message.get("role") not in SYSTEM_ROLES]
        return _digest(self._words_of(asked))

    @staticmethod
    def _words_of(messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> str:
        said = [
            [
                message.get("role"),
                *(_words(message.get(name)) for name in ("content", *REASONING)),
                [_numberless(call) for call in message.get("tool_calls") or ()],
            ]
            for message in messages
        ]
        return json.dumps([said, tools], ensure_ascii=False, sort_keys=True, default=str)

    @property
    def has_system(self) -> bool:
        """Whether it begins with a system turn of its own."""
        return bool(self.messages) and self.messages[0]["role"] in SYSTEM_ROLES

    @property
    def said(self) -> list[int]:
        """The messages that are to be learned: the assistant's, but those that say nothing, which would teach to, and
        those of weight 0."""
        own = (i for i in range(self.n_prompt, len(self.messages)) if self.messages[i]["role"] == ASSISTANT)
        return [i for i in own if self.messages[i].get(WEIGHT, 1) and not is_silent(self.messages[i])]


def _asks(message: dict[str, Any]) -> bool:
    """Not so a system prompt, or a greeting of the assistant's, with which many chats begin."""
    return message.get("role") not in (*SYSTEM_ROLES, ASSISTANT) and not is_silent(message)


def _digest(words: str) -> int:
    return int.from_bytes(hashlib.sha256(words.rstrip().encode()).digest()[:8], "big")


def _words(content: Any) -> str:
    """Of a text, or of the texts of its parts; anything else as JSON has it."""
    if isinstance(content, list) and all(isinstance(part, dict) and set(part) <= {"type", "text"} for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    return content.strip() if isinstance(content, str) else json.dumps(content or "", sort_keys=True, default=str)


def _numberless(call: Any) -> Any:
    return {name: value for name, value in call.items() if name != "id"} if isinstance(call, dict) else call


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value of messages with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {with_texts(name, change): with_texts(entry, change) for name, entry in value.items()}
    return [with_texts(entry, change) for entry in value] if isinstance(value, list | tuple) else value


def is_silent(message: dict[str, Any]) -> bool:
    """Whether nothing stands in a message but white space, nothing is thought, and nothing is called."""
    content = message.get("content") or ""
    texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    texts += [message.get(name) for name in REASONING]
    return not any(str(text or "").strip() for text in texts) and not message.get("tool_calls")


@dataclass(frozen=True)
class TextFile:
    """A whole file that is one document, and that need not fit into memory.

    Attributes:
        path: of the file.
        encoding: of its characters.
    """

    path: Path
    encoding: str = "utf-8"

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def text(self) -> str:
        return "".join(self.pieces())

    def pieces(self) -> Iterator[str]:
        """The text as it is read. Raises UserError where it cannot be decoded."""
        return files.decoded(self.path, self.encoding)
