"""Calls of tools and their answers, as other programs write them and as templates know them."""

import json

import pytest
from outcomes import refusal

from granite_scu.config.errors import UserError
from granite_scu.data.sources.samples import as_document, normalised_tool_calls


def regular(*messages):
    return normalised_tool_calls(list(messages), "messages", "a.jsonl:3")


def calling(*calls, **fields):
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def call(identity, name, arguments):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(text, identity=None):
    return {"role": "tool", "content": text, **({"tool_call_id": identity} if identity else {})}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"city": "Paris", "n": [1, {"a": null}]}', {"city": "Paris", "n": [1, {"a": None}]}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ("{}", {}),
        ("", {}),
        (None, {}),
    ],
    ids=str,
)
def test_arguments_are_an_object_however_they_are_written(given, expected):
    (message,) = regular(calling(call("c", "weather", given)))
    assert message["tool_calls"] == [call("c", "weather", expected)]


def test_a_call_beside_its_id_and_the_one_of_the_first_files_become_the_same():
    made = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    (message,) = regular(calling({"id": "c", "name": "f", "arguments": '{"x": 1}'}))
    assert message["tool_calls"] == [made | {"id": "c"}]
    pair = [
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "1"},
    ]
    assert as_document("a.jsonl:1", {"conversations": pair}, "text").messages == (
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "content": "1"},
    )
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    record = {
        "messages": [{"role": "user", "content": "?"}, old, {"role": "function", "name": "f", "content": "1"}],
        "functions": [{"name": "f", "parameters": {}}],
    }
    chat = as_document("a.jsonl:1", record, "text")
    assert chat.messages[1:] == (
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "name": "f", "content": "1"},
    )
    assert chat.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_no_calls_are_no_field():
    assert regular(calling(content="yo")) == [{"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([call("c", "f", "Paris")], "the arguments of the call of f are no JSON object (Expecting value"),
        ([call("c", "f", '["Paris"]')], "the arguments of the call of f are no JSON object; give"),
        ([call("c", "f", 3)], "the arguments of the call of f are no JSON object; give"),
        ([call("c", "f", '{"a": 1, "a": 2}')], "'a' comes twice"),
        ([call("c", "", {})], "tool_calls has a call without a name"),
        ([["f"]], "tool_calls has a call without a name"),
        ([3], "tool_calls has a call without a name"),
        ("f", "tool_calls is a str; give a list of calls"),
        ({"name": "f"}, "tool_calls is a dict; give a list of calls"),
    ],
    ids=str,
)
def test_what_is_no_call_is_refused_with_its_message(calls, words):
    messages = {"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}
    assert words in refusal(regular, *messages, begins="--data-dir a.jsonl:3: messages, message 2")


def test_answers_stand_in_the_order_of_their_calls():
    """A template that shows no ids would give each call another's answer."""
    one = [calling(call("a", "f", {}), call("b", "g", {})), answer("of g", "b"), answer("of f", "a")]
    more = [calling(call("a", "h", {})), answer("of h", "a"), {"role": "user", "content": "?"}]
    found = [message.get("content") for message in regular(*one, *more)]
    assert found == [None, "of f", "of g", None, "of h", "?"]
    without = [calling(call("", "f", {}), call("", "g", {})), answer("first"), answer("second")]
    assert [message.get("content") for message in regular(*without)] == [None, "first", "second"]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([answer("x", "z")], "'z', which it does not call"),
        ([answer("x", "b")], "makes 2 calls, and the answers behind it are to 'b'"),
        ([answer("x", "a"), answer("y", "a")], "makes 2 calls, and the answers behind it are to 'a', 'a'"),
    ],
    ids=["unknown", "the second alone", "one twice"],
)
def test_answers_that_fit_no_order_are_refused(answers, words):
    called = calling(call("a", "f", {}), call("b", "g", {}))
    assert words in refusal(regular, called, *answers, begins="--data-dir a.jsonl:3: messages, message 1")


@pytest.mark.parametrize("tools", [{"name": "f"}, ["f"], json.dumps({"name": "f"})], ids=str)
def test_tools_are_a_list_of_objects(tools):
    record = {"messages": [{"role": "assistant", "content": "yo"}], "tools": tools}
    with pytest.raises(UserError, match=r"a.jsonl:3: tools is no list of objects"):
        as_document("a.jsonl:3", record, "text")
