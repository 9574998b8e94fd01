"""The ways a run ends before its end, and the exit code of each."""

from collections.abc import Callable
from typing import Any

WRONG_REQUEST, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143
"""Exit codes: of a request to be changed, of a run that failed, after Ctrl-C, after SIGTERM."""


class _OneLine(BaseException):
    """Says all there is to say in its message: a notebook shows that alone, as the commands do."""

    def _render_traceback_(self) -> list[str]:
        """The name that IPython asks for."""
        return [f"{type(self).__name__}: {self}"]


class UserError(_OneLine, Exception):
    """The request or its data is wrong: one line that says what, where, and what to do. Exit code 2."""

    code = WRONG_REQUEST


class RunFailed(_OneLine, Exception):
    """The request was right and the run failed. One line with a diagnosis. Exit code 1."""

    code = FAILED


class Diverged(RunFailed):
    """The training itself came to nothing: a result about its settings. Again on any machine, it would fail again."""


class Stopped(_OneLine):
    """Somebody stopped the run. Like KeyboardInterrupt, it is not for ``except Exception`` to swallow.

    Args:
        line: what was kept, and how to continue.
        code: 130 for Ctrl-C, 143 for SIGTERM.
        alone: the other processes of the run do not stop with this one, which must not wait for them.
    """

    def __init__(self, line: str, code: int, alone: bool = False) -> None:
        super().__init__(line)
        self.code, self.alone = code, alone


def one_line(error: object) -> str:
    """What an error of a library says, in a line; its name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def attempt(check: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What a function returns, and its refusal by ``UserError``; one of the two is empty."""
    try:
        return check(*arguments), ""
    except UserError as error:
        return None, str(error)
