"""Python processes that this program starts: they import what it imports, and nothing from the current folder.

``python -c`` looks for modules in the current folder first, before the standard library, and so would run the
``json.py`` of whoever filled that folder.
"""

import sys
from pathlib import Path

NOT_FROM_HERE = {"PYTHONSAFEPATH": "1"}
"""The same, from Python 3.11 on, for the processes that libraries start, by a variable of the environment."""


def command(code: str, *arguments: str) -> list[str]:
    """The command line that runs ``code`` in another process of this Python.

    Args:
        code: what it runs.
        arguments: its ``sys.argv[1:]``.
    """
    package = str(Path(__file__).parents[2])
    searched = [place for place in sys.path if place and place != package] + [package]
    return [sys.executable, "-I", "-c", f"import sys\nsys.path[:] = {searched!r}\n{code}", *arguments]


def lacks(name: str | None) -> str:
    """What to do where a module of that name is not installed for this Python."""
    return f"the Python in {sys.prefix} lacks the dependencies ({name}): . .venv/bin/activate, after make setup"
