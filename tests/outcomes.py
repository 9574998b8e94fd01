"""How a command ends: what it prints where it does what it should, and the line with which it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from granite_scu.config.errors import UserError
from granite_scu.data.sources.read import load


def refusal(ask: Callable[..., Any], *arguments: Any, begins: str = "", **settings: Any) -> str:
    """What ``ask`` says of these arguments: one line that begins in that way."""
    with pytest.raises(UserError) as refused:
        ask(*arguments, **settings)
    message = str(refused.value)
    assert message.startswith(begins) and "\n" not in message, message
    return message


def refused_data(path: Path | str, column: str = "text", *, begins: str = "--data-dir ", **settings: Any) -> str:
    """What is said of data that cannot be read: it says what to do, too."""
    message = refusal(load, str(path), column, begins=begins, **settings)
    assert "; " in message
    return message


def done(run: Callable[..., tuple[int, str, str]], *arguments: Any) -> str:
    """What a command prints on stdout that ends well."""
    code, out, err = run(*arguments)
    assert code == 0, out + err
    return out


def refused_line(run: Callable[..., tuple[int, str, str]], *arguments: Any) -> str:
    """The one line on stderr of a command that is refused."""
    code, _, err = run(*arguments)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err
