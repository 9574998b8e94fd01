"""The ways to write one conversation: templates differ in what they take, and mean the same.

A call's arguments may be an object or a text that holds it, no content an empty text or no field (transformers takes
null out), and a content of several texts a list or one text.
"""

import json
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from granite_scu.data.sources.documents import Conversation


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
