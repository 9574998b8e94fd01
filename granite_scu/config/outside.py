"""JSON that somebody else may have written, read with one kind of error."""

import json
from typing import Any

DEEPEST = 100
"""Objects and lists inside one another. What this program writes has fewer than ten."""


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The value of a JSON text.

    Args:
        text: bytes are UTF-8.
        options: of ``json.loads``.

    Raises:
        ValueError: it is not UTF-8, not JSON, or nested deeper than ``DEEPEST``; whoever walks it need not fear that.
    """
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, **options)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [value]
    for _ in range(DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
        if not level:
            return value
    raise ValueError("nested too deeply")
