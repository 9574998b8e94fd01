"""From a record to a document: its text column, its messages, or its prompt and completion."""

import json
from typing import Any

from granite_scu.config.errors import UserError
from granite_scu.data.sources.documents import ASSISTANT, ROLES, Conversation, Document, is_silent
from granite_scu.data.sources.formats import Record

MESSAGES, PROMPT, COMPLETION, TOOLS = "messages", "prompt", "completion", "tools"
SAID = ("role", "content", "reasoning_content", "thinking", "name", "tool_calls", "tool_call_id")
"""What is said in a message, of all that a record of it may hold."""


def columns(text_column: str) -> tuple[str, ...]:
    """The fields that a record may have its text in."""
    return (text_column, MESSAGES, PROMPT, COMPLETION, TOOLS)


def as_document(place: str, record: Record, column: str) -> Document:
    """The document that a record stands for.

    Its text column, where it has that; or else ``messages``; or else ``prompt`` and ``completion``, each a text or
    messages. Null is an empty text, as csv has no other; but where what is beside it says something, as in a table
    that was joined from texts and chats, it stands for no text column.

    Args:
        place: of the record, for messages.
        record: its fields.
        column: field that holds the text.

    Raises:
        UserError: none of these fields, or not what they must hold.
    """
    is_joined = record.get(column) is None and (record.get(MESSAGES) or (record.get(PROMPT) and record.get(COMPLETION)))
    record = {name: "" if value is None else value for name, value in record.items()}
    if column in record and column != MESSAGES and not is_joined:
        return Document(place, _text(record[column], f"field {column!r}", place, "; name another with --text-column"))
    if MESSAGES in record:
        tools = _tools(record, place)
        return _conversation(place, _messages(record[MESSAGES], MESSAGES, place), 0, tools)
    if PROMPT in record and COMPLETION in record:
        return _prompted(place, record[PROMPT], record[COMPLETION], _tools(record, place))
    fields = ", ".join(record) or "none"
    raise UserError(
        f"--data-dir {place}: no field {column!r}, there are: {fields}; name one with --text-column, or give "
        "messages, or prompt and completion"
    )


def _prompted(place: str, prompt: Any, completion: Any, tools: list[Any] | None) -> Document:
    plain = None
    if isinstance(prompt, str) or isinstance(completion, str):
        texts = [
            _text(value, f"field {name!r}", place, f"; give {PROMPT} and {COMPLETION} both as texts or as messages")
            for name, value in ((PROMPT, prompt), (COMPLETION, completion))
        ]
        plain = texts[0], texts[1]
        prompt, completion = [{"role": "user", "content": texts[0]}], [{"role": ASSISTANT, "content": texts[1]}]
    before, after = _messages(prompt, PROMPT, place), _messages(completion, COMPLETION, place)
    if plain is not None and not any(text.strip() for text in plain):
        return Document(place, "")
    return _conversation(place, before + after, len(before), tools, plain)


def _tools(record: Record, place: str) -> list[Any] | None:
    return _parsed(record.get(TOOLS), TOOLS, place) or None


def _parsed(value: Any, field: str, place: str) -> Any:
    """A field that csv or parquet may hold as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "[]")
    except (ValueError, RecursionError) as error:
        raise UserError(f"--data-dir {place}: {field} is a text that is not JSON; give a list of {field}") from error


def _messages(value: Any, field: str, place: str) -> tuple[dict[str, Any], ...]:
    """The messages of a field, checked."""
    value = _parsed(value, field, place)
    if not isinstance(value, list):
        raise UserError(f"--data-dir {place}: {field} is a {type(value).__name__}, not a list of messages")
    for number, message in enumerate(value, start=1):
        _check(message, f"{field}, message {number}", place)
    return tuple({name: field for name, field in message.items() if field is not None} for message in value)


def _check(message: Any, what: str, place: str) -> None:
    if not isinstance(message, dict):
        raise UserError(f'--data-dir {place}: {what} is no object; give {{"role": "user", "content": "..."}}')
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"--data-dir {place}: {what} has the unknown role {role!r}; roles are {', '.join(ROLES)}")
    if isinstance(content, str):
        _text(content, what, place, "")
    elif isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise UserError(
                    f"--data-dir {place}: {what} has a part of type {kind!r}; only "
                    '{"type": "text", "text": "..."} can be learned from'
                )
            _text(part["text"], what, place, "")
    elif is_silent({**message, "content": None}):
        kind = "no content" if content is None else f"a {type(content).__name__} as content"
        raise UserError(f"--data-dir {place}: {what} has {kind}; give a text")


def _conversation(
    place: str, messages: tuple[dict[str, Any], ...], n_prompt: int, tools: list[Any] | None, plain: Any = None
) -> Conversation:
    """A conversation, known again by its text as JSON, which is empty where nobody says anything.

    Of a message only what was said is taken: with another number or time of day it is still the same.
    """
    text = ""
    if any(message.get("content") or not is_silent(message) for message in messages):
        said = [{name: message[name] for name in SAID if name in message} for message in messages]
        # Parquet and the hub have times and numbers of their own, which JSON has not.
        text = json.dumps([said, n_prompt, tools], ensure_ascii=False, sort_keys=True, default=str)
    return Conversation(place, _text(text, "the conversation", place, ""), messages, n_prompt, tools, plain)


def _text(value: object, what: str, place: str, remedy: str) -> str:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(f"--data-dir {place}: {what} is a {kind}, not text{remedy}")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which is no character
        raise UserError(
            f"--data-dir {place}: {what} holds a lone surrogate at character {error.start}; mend or remove it"
        ) from error
    return value


def without_nulls(record: Record) -> Record:
    """A row of a table without what no one wrote: in a column of messages each has every field of the column's type,
    null where it has none. A field of the record itself stays, for null is an empty text."""
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
