"""Calls of tools as chat templates know them, and their answers in the order of the calls.

OpenAI's files have a call's arguments as a text that holds JSON, other files as an object. A template that writes
``arguments | tojson`` makes a text in quotes of the first, and a model learns that. Most templates show neither who is
answered nor by which tool, so that an answer belongs to the call in the same place.
"""

from typing import Any

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import parse_json
from granite_scu.data.sources.json_text import unambiguous

CALLS = "tool_calls"
"""Field of a message."""


def with_regular_calls(messages: list[dict[str, Any]], field: str, place: str) -> list[dict[str, Any]]:
    """The messages, each call with ``function``: its ``name``, and its ``arguments`` as an object.

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
