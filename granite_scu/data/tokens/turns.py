"""Where the words of each message stand in a rendered conversation.

Each text of a message is rendered as one private character in its place. What the template writes around it is then
known, and with it the place of the text in the conversation itself, whatever the template left out or where else the
same words occur.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from granite_scu.data.sources.documents import ASSISTANT, THOUGHTS
from granite_scu.data.tokens.control_tokens import THINKING, Places

_TAGS = re.compile(f"({'|'.join(THINKING)})")


class Text(NamedTuple):
    """A text of a message, without the white space around it.

    Attributes:
        text: what stands there.
        message: number of the message.
        is_thought: whether it is thought and not said.
    """

    text: str
    message: int
    is_thought: bool


class Marked(NamedTuple):
    """Messages with a private character in place of each text.

    Attributes:
        messages: what a template renders.
        behind: the text that each of the characters stands for.
    """

    messages: list[dict[str, Any]]
    behind: dict[str, Text]

    def left_out(self, rendered: str) -> int:
        """Messages whose thoughts a template has shown nothing of."""
        thought = {text.message for text in self.behind.values() if text.is_thought}
        shown = {text.message for sign, text in self.behind.items() if text.is_thought and sign in rendered}
        return len(thought - shown)

    def shows(self, message: int, rendered: str) -> bool:
        """Whether a template has shown anything of a message."""
        return any(sign in rendered for sign, text in self.behind.items() if text.message == message)

    def places(self, rendered: str, whole: str) -> "dict[int, Places] | None":
        """Where the texts of each message stand in the conversation itself, in their order.

        Args:
            rendered: these messages as the template renders them.
            whole: the conversation as it does.

        Returns:
            None where the two differ in more than the texts. A message is missing where nothing of it is shown, or
            where it is shown twice or another is shown in its midst.
        """
        parts = re.split(f"([{''.join(self.behind)}])", rendered) if self.behind else [rendered]
        shown = [(self.behind[part].text if part in self.behind else part) for part in parts]
        if "".join(shown) != whole:
            return None
        found: dict[int, list[tuple[int, int]]] = {}
        place, latest, doubtful = 0, -1, set()
        for part, text in zip(parts, shown, strict=True):
            if part in self.behind:
                message = self.behind[part].message
                if rendered.count(part) > 1 or (message != latest and message in found):
                    doubtful.add(message)
                found.setdefault(message, []).append((place, place + len(text)))
                latest = message
            place += len(text)
        return {message: tuple(places) for message, places in found.items() if message not in doubtful}


def is_thought_of(message: dict[str, Any]) -> bool:
    """Whether thoughts may come before a message."""
    return any(name in message for name in THOUGHTS) or THINKING[1] in str(message.get("content"))


def mark(messages: tuple[dict[str, Any], ...], free: Iterator[str]) -> Marked:
    """The messages with a private character for each text that is thought or said.

    Args:
        messages: of a conversation.
        free: characters that do not occur in it.
    """
    behind: dict[str, Text] = {}

    def marked(text: str, number: int, is_thought: bool) -> str:
        words = text.strip()
        if not words:
            return text
        sign = next(free)
        behind[sign] = Text(words, number, is_thought)
        return text.replace(words, sign, 1)

    def content(text: str, number: int) -> str:
        """Of an answer what stands before ``</think>`` is thought."""
        if messages[number]["role"] != ASSISTANT:
            return marked(text, number, is_thought=False)
        parts = _TAGS.split(text)
        following = [*parts[1::2], ""]
        parts[::2] = [marked(part, number, tag == THINKING[1]) for part, tag in zip(parts[::2], following, strict=True)]
        return "".join(parts)

    return Marked([_marked(message, number, marked, content) for number, message in enumerate(messages)], behind)


def _marked(
    message: dict[str, Any], number: int, thought: Callable[..., str], content: Callable[[str, int], str]
) -> dict[str, Any]:
    found = message | {
        name: thought(message[name], number, is_thought=True) for name in THOUGHTS if isinstance(message.get(name), str)
    }
    said = message.get("content")
    if isinstance(said, str):
        found["content"] = content(said, number)
    elif isinstance(said, list):
        found["content"] = [{**part, "text": content(part["text"], number)} for part in said]
    return found
