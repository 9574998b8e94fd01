"""The loop of ``granite-scu generate --chat``: questions and answers, until there is no further question."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from granite_scu.config.errors import UserError
from granite_scu.evaluation.conversation import ConversationFull

RESET = "/reset"
"""A line that begins a new conversation."""

KEPT = f"each line is a question, and what was said before is kept; {RESET} starts over"


def converse(ask: Callable[[str], None], reset: Callable[[], object]) -> None:
    """Ask what a terminal or pipe says, line by line.

    Args:
        ask: answers a question.
        reset: forgets what was said.

    Raises:
        UserError: a pipe without a question, with text that is not UTF-8, or with more than one conversation holds.
    """
    typed = sys.stdin.isatty()
    for number, question in _typed() if typed else _piped():
        if question.strip() == RESET:
            reset()
            continue
        if not typed:
            print(f"> {question}", flush=True)
        try:
            ask(question)
            print()
        except ConversationFull as error:
            if not typed:
                raise UserError(f"standard input, line {number}: {error}") from error
            print(error, file=sys.stderr)


def _typed() -> Iterator[tuple[int, str]]:
    """The lines of a terminal up to an empty one."""
    print(f"{KEPT}; an empty line or Ctrl-D ends", file=sys.stderr)
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys in ``input``)
    number = 0
    with suppress(EOFError):
        while (line := input("> ")).strip():
            number += 1
            yield number, line


def _piped() -> Iterator[tuple[int, str]]:
    """The lines of a pipe that are not empty, each with its number."""
    found = False
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            question = line.decode().rstrip("\r\n")
        except UnicodeError as error:
            raise UserError(f"standard input, line {number}: is not UTF-8 text") from error
        if question.strip():
            if not found:
                print(KEPT, file=sys.stderr, flush=True)
            found = True
            yield number, question
    if not found:
        raise UserError("standard input: the text is empty")
