"""The folder that a run was started in: relative paths in its settings are relative to that one.

It is recorded as seen from the run folder, so that no home folder is stored, and that both may be moved together.
"""

import glob
import os
from pathlib import Path

from granite_scu.storage.run_folder import TRAINING_CONFIG, read_if_there

RECORDED = "working_folder"
"""Its field in ``training_config.json``."""


def record(run: Path) -> str | None:
    """This process's working folder as seen from a run folder; None where no path leads there, from drive to drive."""
    try:
        return Path(os.path.relpath(Path.cwd(), run.resolve())).as_posix()
    except ValueError:
        return None


def as_seen_from_here(path: str, run: Path) -> str:
    """A path, or pattern, of a run's settings, as this process finds it.

    It stays as it is where the run was started in this folder, and where the folder it was started in is not there any
    more or does not have it while this one does.

    Args:
        path: as the settings have it.
        run: the run folder.
    """
    recorded = read_if_there(run / TRAINING_CONFIG).get(RECORDED)
    if not isinstance(recorded, str) or Path(path).expanduser().is_absolute():
        return path
    started_in = Path(os.path.normpath(run.resolve() / recorded))
    there = str(started_in / path)
    if started_in == Path.cwd() or not started_in.is_dir() or (matches(path) and not matches(there)):
        return path
    return there


def found_from_here(name: str, run: Path) -> str:
    """What a run's settings name, as this process finds it: a path as above, or else a name, which stays as it is."""
    path = as_seen_from_here(name, run)
    return path if os.path.exists(path) else name


def matches(path: str) -> bool:
    """Whether there is what a path, or a pattern, stands for."""
    return os.path.exists(path) or next(glob.iglob(path, recursive=True), None) is not None
