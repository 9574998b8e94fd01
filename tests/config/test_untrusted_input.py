"""JSON of a stranger: a value, or a ValueError."""

import json

import pytest

from granite_scu.config.untrusted_input import DEEPEST, parse_json


def test_what_is_json_is_read():
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert parse_json("3") == 3
    assert parse_json(json.dumps({"ä": 1}, ensure_ascii=False).encode()) == {"ä": 1}


@pytest.mark.parametrize("text", ["{", b"\xff", "[" * 200_000, "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1)])
def test_what_is_none_or_nested_too_deeply_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting|utf-8"):
        parse_json(text)


def test_as_deep_as_allowed_is_read():
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)
