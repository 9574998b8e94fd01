"""What takes long to find and stays true, kept by key in small JSON files of the user's cache folder."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from granite_scu.config.untrusted_input import parse_json
from granite_scu.storage.atomic import replacing

T = TypeVar("T")

MAX_ENTRIES = 500
"""Of a file; the oldest make way."""

_unkept: dict[str, dict[str, Any]] = {}
"""What this process has found and could not keep: a home folder may be read-only."""


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again. Raises RuntimeError where there is no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "granite-scu").expanduser()


def digest_of(value: Any) -> str:
    """A name for a value, as JSON has it: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def kept(
    file: str, key: Any, find: Callable[[], Any], read: Callable[[Any], T], keep: Callable[[], bool] = lambda: True
) -> T:
    """What ``find`` finds, which is called once for a key on this machine.

    A file that is damaged or cannot be written, and an entry that ``read`` refuses, are as if they were not there.

    Args:
        file: name of the file.
        key: all that the answer depends on, as JSON has it.
        find: returns the answer, as JSON has it.
        read: makes of it what is returned; refuses by a TypeError, ValueError or KeyError what ``find`` cannot have
            found.
        keep: asked behind ``find``, whether its answer is worth keeping.
    """
    place, name = None, digest_of(key)
    with suppress(RuntimeError):
        place = cache_folder() / file
    for entries in (_entries(place), _unkept.get(file, {})):
        with suppress(KeyError, TypeError, ValueError):
            return read(entries[name])
    answer = find()
    if not keep():
        return read(answer)
    try:
        _keep(place, name, answer)
    except OSError:
        _unkept.setdefault(file, {})[name] = answer
    return read(answer)


def _keep(place: Path | None, name: str, answer: Any) -> None:
    if place is None:
        raise FileNotFoundError("this user has no home folder")
    others = {known: each for known, each in _entries(place).items() if known != name}
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as temporary:
        temporary.write_text(json.dumps(dict([*others.items(), (name, answer)][-MAX_ENTRIES:])), encoding="utf-8")


def _entries(place: Path | None) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = parse_json(place.read_bytes()) if place else {}
        return found if isinstance(found, dict) else {}
    return {}


@cache
def code_versions() -> dict[str, str]:
    """The code that a model is made and simulated by, for what is kept for that code alone: the versions of the
    libraries, and a checksum of our own code of models and of their settings."""
    package = Path(__file__).parents[1]
    sources = sorted(file for folder in ("config", "model") for file in (package / folder).rglob("*.py"))
    ours = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    return {"granite_scu": ours} | {name: version(name) for name in ("torch", "transformers", "peft")}
