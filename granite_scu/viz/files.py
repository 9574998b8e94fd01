"""How files get written completely or not at all, and what a command says about them."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; on success it takes the place of ``path``, otherwise it vanishes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # and not the temporary name; of a full disk the system names nothing at all
        raise
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: str | Path) -> Path:
    """The folder, made where it is missing.

    Raises:
        ValueError: it, or one above it, is a file or cannot be written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"--out {folder}: is a file, or lies below one; name a folder") from error
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be made ({error.strerror}); name another folder") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {folder}: cannot be written; name another folder")
    return folder


def report_outcome(write: Callable[[], Iterable[Path]]) -> int:
    """Write, and print what was written or in one line why not; returns the exit code of a command."""
    try:
        written = list(write())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except RecursionError:
        print("error: a file that was read is nested too deeply; it is damaged", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(*written, sep="\n")
    return 0
