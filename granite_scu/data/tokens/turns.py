"""One conversation written in other ways, by which a chat template shows what it does with it.

Spelled otherwise: templates differ in what they take, and mean the same. A call's arguments may be an object or a text
that holds it, no content an empty text or no field (transformers takes null out), and a content of several texts a list
or one text.

Marked: each text of a message is one private character in its place. What the template writes around it is then known,
and with it the place of the text in the conversation itself, whatever the template left out or where else the same
words occur.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from granite_scu.data.sources.documents import ASSISTANT, REASONING, Conversation, with_texts
from granite_scu.data.tokens.special_tokens import THINKING, Places, placeholders

_TAGS = re.compile(f"({'|'.join(THINKING)})")


class Spelling(NamedTuple):
    """One of these ways.

    Attributes:
        is_joined: a content of several texts is one text, a line end between two, as vLLM and llama.cpp write it.
        arguments_as_text: a call's arguments are JSON.
        is_empty: a message that says nothing has an empty text as content, and not none.
    """

    is_joined: bool = False
    arguments_as_text: bool = False
    is_empty: bool = True

    def of(self, conversation: Conversation) -> Conversation:
        """The conversation, written so."""
        return replace(conversation, messages=tuple(map(self._message, conversation.messages)))

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if _says_nothing(message):
            message.pop("content", None)
            message |= {"content": ""} if self.is_empty else {}
        elif self.is_joined and isinstance(message["content"], list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        if self.arguments_as_text and "tool_calls" in message:
            message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return message


def spellings(conversation: Conversation) -> list[Spelling]:
    """Those in which a conversation differs, the one that most templates take first."""
    messages = conversation.messages
    lists = [False, True] if any(isinstance(each.get("content"), list) for each in messages) else [False]
    calls = [False, True] if any("tool_calls" in each for each in messages) else [False]
    empty = [True, False] if any(map(_says_nothing, messages)) else [True]
    return [Spelling(*each) for each in product(lists, calls, empty)]


def _says_nothing(message: dict[str, Any]) -> bool:
    return "content" not in message or ("tool_calls" in message and not message["content"])


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


class Text(NamedTuple):
    """A text of a message, without the white space around it.

    Attributes:
        text: what stands there.
        message: number of the message; -1 of what stands beside all of them.
        what: what it is, for refusals; empty for a thought, which templates may leave out.
        wrong: what stands before it where a template writes the list or the text that it is in as JSON. Python's way to
            print a value shows no private character.
    """

    text: str
    message: int
    what: str = ""
    wrong: str = ""


class Marked(NamedTuple):
    """A conversation with a private character in place of each text.

    Attributes:
        conversation: what a template renders.
        behind: the text that each of the characters stands for, in their order.
    """

    conversation: Conversation
    behind: dict[str, Text]

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


def mark(conversation: Conversation, everything: bool = False, only: int | None = None) -> Marked:
    """The conversation with a private character for each text that is thought or said.

    Args:
        conversation: what is marked.
        everything: mark also what else a template must show: calls of tools, the tools, and names where they tell the
            speakers of a role apart.
        only: number of the one text that is marked, of all that would be.
    """
    messages, tools = conversation.messages, conversation.tools
    marker = _Marker(placeholders([messages, tools]), only)
    named = _telling_names(messages) if everything else set()
    found = tuple(marker.message(each, n, n in named, calls=everything) for n, each in enumerate(messages))
    tools = [_named_tool(tool, marker.text) for tool in tools or []] if everything else tools
    return Marked(replace(conversation, messages=found, tools=tools or None), marker.behind)


class _Marker:
    """Puts a private character in the place of each text, and keeps what stands behind it.

    Args:
        free: private characters that stand in none of the texts.
        only: number of the one text that is marked; None marks all.
    """

    def __init__(self, free: Iterator[str], only: int | None) -> None:
        self.free, self.only = free, only
        self.behind: dict[str, Text] = {}

    def text(self, text: str, number: int, what: str = "", wrong: str = "") -> str:
        """A text of message ``number``, marked; the rest as ``Text`` has it."""
        words = text.strip()
        if not words:
            return text
        sign = next(self.free)
        self.behind[sign] = Text(words, number, what, wrong)
        return text.replace(words, sign, 1) if self.only in (None, len(self.behind) - 1) else text

    def message(self, given: dict[str, Any], number: int, named: bool, calls: bool) -> dict[str, Any]:
        """A message with its texts marked, and with its name and its calls of tools if asked for."""
        found = given | {name: self.text(given[name], number) for name in REASONING if isinstance(given.get(name), str)}
        said, role = given.get("content"), given["role"]
        if isinstance(said, str):
            found["content"] = self._content(said, role, number)
        elif isinstance(said, list):
            found["content"] = [
                {**each, "text": self._content(each["text"], role, number, '"text": "')} for each in said
            ]
        if named:
            what = f"the name of message {number + 1}, which tells its speaker from others of that role"
            found["name"] = self.text(given["name"], number, what)
        if calls and given.get("tool_calls"):
            found["tool_calls"] = [self._call(each, number) for each in given["tool_calls"]]
        return found

    def _content(self, text: str, role: str, number: int, wrong: str = "") -> str:
        """Of an answer what stands before ``</think>`` is thought."""
        what = f"the content of message {number + 1}, whose role is {role}"
        parts = _TAGS.split(text) if role == ASSISTANT else [text]
        following = [*parts[1::2], ""]
        parts[::2] = [
            self.text(part, number, "" if tag == THINKING[1] else what, wrong)
            for part, tag in zip(parts[::2], following, strict=True)
        ]
        return "".join(parts)

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        function, what = call["function"], f"the tool calls of message {number + 1}"
        name = self.text(function["name"], number, what)
        arguments = with_texts(
            function["arguments"], lambda text: self.text(text, number, f"the arguments of {what}", wrong='\\"')
        )
        found = call | {"function": function | {"name": name, "arguments": arguments}}
        if isinstance(call.get("id"), str):  # which Kimi's template shows in place of the name that it holds
            found["id"] = call["id"].replace(function["name"], name)
        return found


def _telling_names(messages: tuple[dict[str, Any], ...]) -> set[int]:
    """The messages with a name that others of their role have not. An answer of a tool's stands where its call does."""
    names: dict[str, set[str]] = {}
    for each in messages:
        names.setdefault(each["role"], set()).add(str(each.get("name", "")))
    return {
        number
        for number, each in enumerate(messages)
        if isinstance(each.get("name"), str) and len(names[each["role"]]) > 1 and each["role"] != "tool"
    }


def _named_tool(tool: dict[str, Any], marked: Any) -> dict[str, Any]:
    function = tool.get("function")
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return tool | {"function": function | {"name": marked(function["name"], -1, "the tools beside the messages")}}
    if isinstance(tool.get("name"), str):
        return tool | {"name": marked(tool["name"], -1, "the tools beside the messages")}
    return tool
