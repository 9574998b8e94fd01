"""What the files of a folder were when it was written, so that damage to any byte of them shows."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from granite_scu.config.untrusted_input import parse_json, read_file

NAME = "manifest.json"
_CHUNK = 1 << 20


def write(folder: Path) -> None:
    """Write the manifest of everything that ``folder`` holds now, subfolders included."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    (folder / NAME).write_bytes(_text(folder, names))


def damage(folder: Path, wanted: Sequence[str] = ()) -> str | None:
    """What differs from the manifest, in a few words; None where everything is unchanged.

    Files that came later are no damage.

    Args:
        folder: that ``write`` was called for.
        wanted: files that must be among those that were written.
    """
    try:
        written = read_file(folder / NAME)
        sizes = {name: facts["bytes"] for name, facts in parse_json(written)["files"].items()}
    except FileNotFoundError:
        return f"{NAME} is missing"
    except OSError as error:
        return f"{NAME} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{NAME} is damaged"
    if unnamed := [name for name in wanted if name not in sizes]:
        return f"{NAME} does not name {unnamed[0]}"
    try:
        if missing := [name for name in sizes if not (folder / name).is_file()]:
            return f"{missing[0]} is missing"
        if other := [name for name, size in sizes.items() if (folder / name).stat().st_size != size]:
            return f"{other[0]} is damaged"  # and may be too large to be read
        now = _text(folder, list(sizes))
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    if now == written:
        return None
    before, after = (json.loads(text)["files"] for text in (written, now))
    differing = [name for name in sizes if before[name] != after[name]]
    return f"{differing[0]} is damaged" if differing else f"{NAME} is damaged"


def _text(folder: Path, names: list[str]) -> bytes:
    """The manifest's one form: a byte that differs is damage, wherever it lies."""
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
    return (json.dumps({"schema": 1, "files": files}, indent=1) + "\n").encode()


def sha256(path: Path) -> str:
    """Of a file of any size, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
