"""The command that continues a run: the words that started it, with ``--resume-from-checkpoint last``."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from granite_scu.hardware.machine import launched_processes

PROGRAMS = ("granite-scu", "train_granite_cuda.py", "granite_scu/__main__.py")
"""What the first of ``sys.argv`` ends with where one of our training commands was started."""

FLAG, DOTTED = "--resume-from-checkpoint", "--run.resume"
REPLACED = (FLAG, DOTTED, "--output-dir", "--run.output_dir")
DROPPED = ("--overwrite", "--no-overwrite", "--run.overwrite")


def flag() -> str:
    """What has this program continue: the friendly flag, or the dotted key of ``fit``."""
    return f"{DOTTED if sys.argv[1:2] == ['fit'] else FLAG} last"


def command(folder: str) -> str:
    """The whole command that continues a run of this process.

    Args:
        folder: the run folder.
    """
    launched = launched_processes() is not None  # the launcher's own words are not known
    if launched or not f"/{Path(sys.argv[0]).as_posix()}".endswith(tuple(f"/{program}" for program in PROGRAMS)):
        return f"the same command and {flag()}"
    words, output = sys.argv[1:], "--run.output_dir" if sys.argv[1:2] == ["fit"] else "--output-dir"
    return shlex.join([*_program(), *_kept(words), output, folder, *flag().split()])


def _program() -> list[str]:
    started = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return ["granite-scu"] if Path(started[-1]).name == "granite-scu" else started


def _kept(words: Sequence[str]) -> list[str]:
    """The words without the flags that the command ends with, and without what would replace the run."""
    kept, skip_value = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        name = name if "." in name else name.replace("_", "-")
        if name.startswith("--"):
            takes_value = name in REPLACED or (name in DROPPED and "." in name)
            skip_value = takes_value and not equals
            if name in REPLACED + DROPPED:
                continue
        elif skip_value:
            skip_value = False
            continue
        kept.append(word)
    return kept
