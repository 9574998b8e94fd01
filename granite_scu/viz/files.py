"""Where files are written, and what a command says about them."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


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
