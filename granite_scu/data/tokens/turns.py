"""Where the words of each message stand in a rendered conversation.

Each text of a message is rendered as one private character in its place. What the template writes around it is then
known, and with it the place of the text in the conversation itself, whatever the template left out or where else the
same words occur.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from granite_scu.data.sources.documents import ASSISTANT, THOUGHTS, Conversation, with_texts
from granite_scu.data.tokens.control_tokens import THINKING, Places, stand_ins, texts_in

_TAGS = re.compile(f"({'|'.join(THINKING)})")


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
    messages = conversation.messages
    free: Iterator[str] = stand_ins("".join(texts_in([messages, conversation.tools])))
    behind: dict[str, Text] = {}

    def marked(text: str, number: int, what: str = "", wrong: str = "") -> str:
        words = text.strip()
        if not words:
            return text
        sign = next(free)
        behind[sign] = Text(words, number, what, wrong)
        return text.replace(words, sign, 1) if only in (None, len(behind) - 1) else text

    def content(text: str, number: int, wrong: str = "") -> str:
        """Of an answer what stands before ``</think>`` is thought."""
        role = messages[number]["role"]
        what = f"the content of message {number + 1}, whose role is {role}"
        parts = _TAGS.split(text) if role == ASSISTANT else [text]
        following = [*parts[1::2], ""]
        parts[::2] = [
            marked(part, number, "" if tag == THINKING[1] else what, wrong)
            for part, tag in zip(parts[::2], following, strict=True)
        ]
        return "".join(parts)

    def call(call: dict[str, Any], number: int) -> dict[str, Any]:
        function, what = call["function"], f"the tool calls of message {number + 1}"
        name = marked(function["name"], number, what)
        arguments = with_texts(
            function["arguments"], lambda text: marked(text, number, f"the arguments of {what}", wrong='\\"')
        )
        found = call | {"function": function | {"name": name, "arguments": arguments}}
        if isinstance(call.get("id"), str):  # which Kimi's template shows in place of the name that it holds
            found["id"] = call["id"].replace(function["name"], name)
        return found

    def message(number: int) -> dict[str, Any]:
        given = messages[number]
        found = given | {name: marked(given[name], number) for name in THOUGHTS if isinstance(given.get(name), str)}
        said = given.get("content")
        if isinstance(said, str):
            found["content"] = content(said, number)
        elif isinstance(said, list):
            found["content"] = [{**part, "text": content(part["text"], number, '"text": "')} for part in said]
        if everything and number in named:
            what = f"the name of message {number + 1}, which tells its speaker from others of that role"
            found["name"] = marked(given["name"], number, what)
        if everything and given.get("tool_calls"):
            found["tool_calls"] = [call(each, number) for each in given["tool_calls"]]
        return found

    named = _telling_names(messages)
    found = tuple(message(number) for number in range(len(messages)))
    tools = [_named_tool(tool, marked) for tool in conversation.tools or []] if everything else conversation.tools
    return Marked(replace(conversation, messages=found, tools=tools or None), behind)


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
