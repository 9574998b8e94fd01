"""From a record to a document: its text column, or the conversation that one of the ``record_formats`` makes of it."""

import functools
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import parse_json
from granite_scu.data.sources.documents import (
    ASSISTANT,
    REASONING,
    ROLES,
    WEIGHT,
    Conversation,
    Document,
    is_silent,
    with_texts,
)
from granite_scu.data.sources.files import unix
from granite_scu.data.sources.formats import Record, unambiguous
from granite_scu.data.sources.record_formats import (
    AUTO,
    BY_NAME,
    EITHER,
    FIELDS,
    FORMATS,
    FUNCTIONS,
    HISTORY,
    OF_MESSAGES,
    SPEAKERS,
    SYSTEM,
    TEXT,
    TOOLS,
    RecordFormat,
    as_message,
    matching,
)

_log = logging.getLogger(__name__)

MESSAGES = "messages"
SAID = ("role", "content", *REASONING, "name", "tool_calls", "tool_call_id", WEIGHT)
"""The words of a message, without the other fields of its record."""

LABEL = "label"
"""Field that says of preference data whether an answer is a good one."""

_KNOWN = ", ".join(" and ".join(each.needed) for each in FORMATS[:-1]) + f", or {' and '.join(FORMATS[-1].needed)}"


def columns(text_column: str) -> tuple[str, ...]:
    """The fields that are read of a record."""
    return tuple(dict.fromkeys((text_column, *FIELDS, LABEL)))


def documents_of(records: Iterable[tuple[str, Record]], column: str, record_format: str) -> Iterator[Document]:
    """The documents of a file, or of a split: its conversations are all in one format, its texts may stand among them.

    Args:
        records: each after its place.
        column: field that holds the text.
        record_format: as in ``DataConfig``.

    Raises:
        UserError: as ``as_document``, and conversations in two formats.
    """
    first = None
    for number, (place, record) in enumerate(records):
        document = as_document(place, record, column, record_format)
        if not number and record_format == AUTO and document.record_format == TEXT:
            for other in matching(record):
                if all(record[name] for name in other.needed):
                    _say_passed_over(place, column, other)
        if not number and document.record_format and _log.isEnabledFor(logging.INFO):  # once, and not unheard
            read = BY_NAME[document.record_format].fields if isinstance(document, Conversation) else (column,)
            _say_unread(place, ", ".join(name for name in record if name not in read))
        if isinstance(document, Conversation):
            first = first or document.record_format
            if document.record_format != first:
                here, before = BY_NAME[document.record_format], BY_NAME[first]
                raise UserError(
                    f"--data-dir {place}: is {here.label} ({', '.join(here.needed)}), and what comes before it is "
                    f"{before.label} ({', '.join(before.needed)}); put each format into a file of its own"
                )
        yield document


@functools.cache  # files are read more than once
def _say_unread(place: str, fields: str) -> None:
    if fields:
        _log.info("%s: fields not read: %s", place, fields)


@functools.cache
def _say_passed_over(place: str, column: str, other: RecordFormat) -> None:
    """Warn that a record whose text is read is a conversation in another format, too."""
    fields, remedy = " and ".join(other.needed), f"--record-format {other.name} reads these instead"
    _log.warning("%s: its %s is read, and all of it learned; not so %s beside it: %s", place, column, fields, remedy)


def as_document(place: str, record: Record, column: str, record_format: str = AUTO) -> Document:
    """The document that a record stands for.

    Its text column, where it has that, or else the conversation of the format whose fields it has. Null is an empty
    text, as csv has no other; but where what is beside it says something, as in a table that was joined from texts and
    chats, it stands for no text column.

    Args:
        place: of the record, for messages.
        record: its fields.
        column: field that holds the text.
        record_format: as in ``DataConfig``.

    Raises:
        UserError: no fields that are known or those of two formats, or not what they must hold.
    """
    # pandas writes what is missing as NaN, the one value that is not itself.
    record = {name: "" if value is None or value != value else value for name, value in record.items()}
    is_joined = not record.get(column) and any(all(record.get(name) for name in each.needed) for each in FORMATS)
    wants_text = record_format == TEXT or (record_format == AUTO and column != MESSAGES and not is_joined)
    if wants_text and column in record:
        text = _text(record[column], f"field {column!r}", place, "; name another with --text-column")
        return Document(place, text, record_format=TEXT)
    wanted = _format_of(place, record, column, record_format)
    if str(record.get(LABEL)).lower() in ("true", "false"):  # a text in csv
        raise _preferences(place, record)
    return _chat(place, record, wanted)


def _format_of(place: str, record: Record, column: str, record_format: str) -> RecordFormat:
    """The format that a record is read in. Raises UserError where it has not its fields, or those of two."""
    fields = ", ".join(record) or "none"
    if record_format in BY_NAME:
        asked = BY_NAME[record_format]
        if missing := [name for name in asked.needed if name not in record]:
            raise UserError(
                f"--data-dir {place}: no field {missing[0]!r}, which --record-format {record_format} needs, there are: "
                f"{fields}; name another format, or leave --record-format out"
            )
        return asked
    found = matching(record) if record_format == AUTO else []
    if len(found) > 1:
        both = " and ".join(f"{each.label} ({', '.join(each.needed)})" for each in found)
        raise UserError(
            f"--data-dir {place}: has the fields of more than one format, {both}; say which is meant with "
            f"--record-format {' or '.join(each.name for each in found)}"
        )
    if not found and {"chosen", "rejected"} <= record.keys():
        raise _preferences(place, record)
    lists = [name for name, value in record.items() if isinstance(value, list) and isinstance([*value, 0][0], dict)]
    if lists and not found:
        is_chat = "role" in record[lists[0]][0]
        what = f"call {lists[0]} messages, of role and content each" if is_chat else "give what is in that list alone"
        raise UserError(f"--data-dir {place}: no field {column!r}, and {lists[0]!r} holds a list of objects; {what}")
    if not found:
        raise UserError(
            f"--data-dir {place}: no field {column!r}, there are: {fields}; name one with --text-column, or give "
            f"{_KNOWN}"
        )
    return found[0]


def _preferences(place: str, record: Record) -> UserError:
    """What data gets in which bad answers stand among the good ones: all would be learned."""
    return UserError(
        f"--data-dir {place}: is preference data ({', '.join(record)}), and all answers are learned as good ones; give "
        f"the chosen ones, or those with a true {LABEL}, as prompt and completion, and leave the others and {LABEL} out"
    )


def _chat(place: str, record: Record, wanted: RecordFormat) -> Document:
    """The conversation of a record; an empty document where prompt and completion are empty."""
    fields = _fields(place, record, wanted)
    messages, n_prompt, plain = wanted.chat(fields)
    if plain and not any(text.strip() for text in plain):
        return Document(place, "")
    is_said = any(message.get("content") or not is_silent(message) for message in messages)
    text = ""
    if is_said:
        # Of a message only what was said is taken: with another number or time of day it is still the same.
        said = [{name: message[name] for name in SAID if name in message} for message in messages]
        # Parquet and the hub have times and numbers of their own, which JSON has not.
        text = json.dumps([said, n_prompt, fields.get(TOOLS)], ensure_ascii=False, sort_keys=True, default=str)
        text = _text(text, "the conversation", place, "")
    tools = fields.get(TOOLS)
    return Conversation(place, text, tuple(messages), n_prompt, tools, plain, record_format=wanted.name)


def _fields(place: str, record: Record, wanted: RecordFormat) -> Record:
    """What a format reads of a record, checked: texts, messages, and tools."""
    lists = OF_MESSAGES if any(isinstance(record.get(name), str) for name in EITHER) else (*OF_MESSAGES, *EITHER)
    found: Record = {}
    for name in wanted.fields:
        value = record.get(name, "")
        if name in (TOOLS, FUNCTIONS):
            found[name] = _tools(value, name, place)
        elif name == HISTORY:
            # A text that is no list is another tool's, as any other field.
            found[name] = _pairs(value, place) if str(value).lstrip().startswith("[") else []
        elif name in lists:
            found[name] = _messages(value, name, place)
        else:
            both = f"; give {EITHER[0]} and {EITHER[1]} both as texts or as messages" if name in EITHER else ""
            found[name] = _text(value, f"field {name!r}", place, both or "; give a text")
    first, second = SYSTEM
    found[first] = found[first] or found.pop(second)
    if functions := found.pop(FUNCTIONS, None):
        found[TOOLS] = found[TOOLS] or [{"type": "function", "function": function} for function in functions]
    return found


def _pairs(value: Any, place: str) -> list[list[str]]:
    """The history of a chat, checked; none where there is none."""
    pairs = _parsed(value, HISTORY, place) or []
    texts = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    )
    if not texts:
        raise UserError(f"--data-dir {place}: {HISTORY} is no list of pairs of texts; correct it, or take it out")
    return pairs


def _tools(value: Any, field: str, place: str) -> list[Any] | None:
    """Descriptions of tools, checked; None where there are none."""
    tools = _parsed(value, field, place) or None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(
            f"--data-dir {place}: {field} is no list of objects; give a list of {field}, as OpenAI has them"
        )
    return tools


def _parsed(value: Any, field: str, place: str) -> Any:
    """A field that csv or parquet may hold as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value or "[]")
    except ValueError as error:
        raise UserError(f"--data-dir {place}: {field} is a text that is not JSON; give a list of {field}") from error


def _messages(value: Any, field: str, place: str) -> list[dict[str, Any]]:
    """The messages of a field, checked."""
    value = _parsed(value, field, place)
    if not isinstance(value, list):
        raise UserError(f"--data-dir {place}: {field} is a {type(value).__name__}, not a list of messages")
    messages = [as_message(entry) if isinstance(entry, dict) else entry for entry in value]
    for number, message in enumerate(messages, start=1):
        _check(message, f"{field}, message {number}", place)
    return with_texts(normalised_tool_calls(messages, field, place), unix)


def _check(message: Any, what: str, place: str) -> None:
    if not isinstance(message, dict):
        raise UserError(f'--data-dir {place}: {what} is no object; give {{"role": "user", "content": "..."}}')
    role, content = message.get("role"), message.get("content")
    if "train_detail" in message:
        raise UserError(
            f"--data-dir {place}: {what} has train_detail, which weighs parts of a message; give train or weight, for "
            "the whole of it"
        )
    if role not in ROLES:
        raise UserError(f"--data-dir {place}: {what} has the unknown role {role!r}; roles are {', '.join(SPEAKERS)}")
    if role == ASSISTANT and message.get(WEIGHT, 1) not in (0, 1):
        raise UserError(
            f"--data-dir {place}: {what} has the weight {message[WEIGHT]!r}; give 0 where it is not to be "
            "learned, 1 or nothing where it is, as weight or train"
        )
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


def _text(value: object, what: str, place: str, remedy: str) -> str:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(f"--data-dir {place}: {what} is a {kind}, not text{remedy}")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which is no character
        raise UserError(
            f"--data-dir {place}: {what} holds a lone surrogate at character {error.start}; correct or remove it"
        ) from error
    return unix(value)


def without_nulls(record: Record) -> Record:
    """A row of a table without what no one wrote: in a column of messages each has every field of the column's type,
    null where it has none. A field of the record itself stays, for null is an empty text."""
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


CALLS = "tool_calls"
"""Field of a message."""


def normalised_tool_calls(messages: list[dict[str, Any]], field: str, place: str) -> list[dict[str, Any]]:
    """The messages, each call with ``function``: its ``name``, and its ``arguments`` as an object.

    OpenAI's files have a call's arguments as a text that holds JSON, other files as an object. A template that writes
    ``arguments | tojson`` makes a text in quotes of the first, and a model learns that. Most templates show neither who
    is answered nor by which tool, so that an answer belongs to the call in the same place.

    Args:
        messages: of a conversation; their roles are known.
        field: that holds them, for errors.
        place: of the record, for errors.

    Raises:
        UserError: a call without a name, arguments that are no JSON object, or answers that do not fit the calls.
    """
    found = [_with_calls(each, f"--data-dir {place}: {field}, message {i}") for i, each in enumerate(messages, start=1)]
    begin = 0
    for end in range(1, len(found) + 1):
        if end == len(found) or found[end]["role"] != "tool":
            calls = found[begin].get(CALLS)
            if calls and end > begin + 1:
                what = f"--data-dir {place}: {field}, message {begin + 1}"
                found[begin + 1 : end] = _in_order(calls, found[begin + 1 : end], what)
            begin = end
    return found


def _with_calls(message: dict[str, Any], what: str) -> dict[str, Any]:
    calls = message.get(CALLS) or []
    if not isinstance(calls, list):
        raise UserError(f"{what}: {CALLS} is a {type(calls).__name__}; give a list of calls")
    without = {name: value for name, value in message.items() if name != CALLS}
    return without | {CALLS: [_call(call, what) for call in calls]} if calls else without


def _call(call: Any, what: str) -> dict[str, Any]:
    if isinstance(call, dict) and "function" not in call:  # name and arguments stand beside the id
        own = {name: call[name] for name in ("name", "arguments") if name in call}
        call = {"type": "function"} | {name: value for name, value in call.items() if name not in own}
        call["function"] = own
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise UserError(
            f'{what}: {CALLS} has a call without a name; give {{"function": {{"name": "f", "arguments": {{}}}}}}'
        )
    given, reason = function.get("arguments"), ""
    try:
        # OpenAI has "" where a function takes nothing.
        given = parse_json(given or "{}", object_pairs_hook=unambiguous) if isinstance(given, str) else given
    except ValueError as error:
        given, reason = "", f" ({error})"
    arguments = {} if given is None else given
    if not isinstance(arguments, dict):
        raise UserError(
            f"{what}: the arguments of the call of {function['name']} are no JSON object{reason}; give an object, or a "
            "text that holds one"
        )
    return call | {"function": function | {"arguments": arguments}}


def _in_order(calls: list[dict[str, Any]], answers: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """The answers in the order of the calls, by the ids of both. Without ids they are as they come."""
    ids = [call.get("id") for call in calls]
    answered = [answer.get("tool_call_id") for answer in answers]
    if not all(ids) or not all(answered) or len(set(map(str, ids))) < len(ids):
        return answers
    if unknown := next((each for each in answered if each not in ids), None):
        raise UserError(f"{what} is followed by an answer to {unknown!r}, which it does not call; correct tool_call_id")
    places = [ids.index(each) for each in answered]
    if sorted(places) != list(range(len(places))):
        raise UserError(
            f"{what} makes {len(ids)} calls, and the answers behind it are to {', '.join(map(repr, answered))}; give "
            "each call one answer"
        )
    return [answer for _, answer in sorted(zip(places, answers, strict=True), key=lambda pair: pair[0])]
