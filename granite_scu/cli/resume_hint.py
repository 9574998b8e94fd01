"""The command that continues a run: the words that started it, with ``--resume-from-checkpoint last``."""

import argparse
import shlex
import sys
from pathlib import Path

from granite_scu.config.flags import NAMES
from granite_scu.hardware.machine import launched_processes

PROGRAMS = ("granite-scu", "train_granite_cuda.py", "granite_scu/__main__.py")
"""What the first of ``sys.argv`` ends with where one of our training commands was started."""

RESUME, FOLDER, OVERWRITE = "run.resume", "run.output_dir", "run.overwrite"


def flag() -> str:
    """What has this program continue: the friendly flag, or the dotted key of ``fit``."""
    return f"{_named(RESUME)} last"


def command(folder: str) -> str:
    """The whole command that continues a run of this process.

    Args:
        folder: the run folder.
    """
    launched = launched_processes() is not None  # the launcher's own words are not known
    if launched or not f"/{Path(sys.argv[0]).as_posix()}".endswith(tuple(f"/{program}" for program in PROGRAMS)):
        return f"the same command and {flag()}"
    return shlex.join([*_program(), *_kept(sys.argv[1:]), _named(FOLDER), folder, *flag().split()])


def _named(key: str) -> str:
    return f"--{key}" if sys.argv[1:2] == ["fit"] else NAMES[key]


def _program() -> list[str]:
    started = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return ["granite-scu"] if Path(started[-1]).name == "granite-scu" else started


def _kept(words: list[str]) -> list[str]:
    """The words without the flags that the command ends with, and without what would replace the run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for key in (RESUME, FOLDER):
        parser.add_argument(f"--{key}", NAMES[key], f"--{NAMES[key][2:].replace('-', '_')}")
    parser.add_argument(f"--{OVERWRITE}")
    parser.add_argument(NAMES[OVERWRITE], action=argparse.BooleanOptionalAction)
    return parser.parse_known_args(words)[1]
