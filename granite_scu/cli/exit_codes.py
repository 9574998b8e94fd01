"""From exceptions to exit codes and one line on stderr."""

import errno
import gc
import io
import os
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, TextIO

from granite_scu.cli.robust_stdout import open_what_is_closed
from granite_scu.config.errors import FAILED, INTERRUPTED, TERMINATED, WRONG_REQUEST, RunFailed, Stopped, UserError
from granite_scu.config.own_python import lacks
from granite_scu.config.untrusted_input import printable
from granite_scu.export.publish.leaks import redact

NOTHING_WRITTEN = "nothing was written"
NOTHING_KEPT = "nothing is kept; start the same command again"
HOW_TO_CONTINUE = (
    "steps since the last checkpoint are lost; where there is one, --resume-from-checkpoint last continues from it; "
    "where there is none, the same command with --overwrite starts again"
)

OUTPUT = "standard output"

_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "change its permissions",
    errno.EIO: "the disk itself failed, look at the system's log",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENOLCK: "choose a folder on a file system that has locks",
    errno.ENOENT: "it was deleted or moved while it was needed",
}
"""What to do about the ways in which a file cannot be written."""

_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Faults of a disk, whatever was asked for."""

_LONG = 500
"""Characters of a word that are printed as they are; a path may have as many."""

_NO_DOCSTRINGS = (
    "Python was started with -OO, or with PYTHONOPTIMIZE=2, and transformers cannot be imported without docstrings; "
    "start it with -O or with neither"
)
_NO_HOME = "no home folder of this user is known, and a path needs it: set HOME, or name --cache-dir and --output-dir"
_NO_SUCH_HOME = "begins with ~ and no user of this machine is called what follows; write it out"


def exit_code_of(run: Callable[[], int], debug: bool, how_to_continue: str = HOW_TO_CONTINUE) -> int:
    """Call ``run``; an error, or somebody's stop, becomes one line and an exit code, with ``debug`` a traceback too.

    Args:
        run: returns the exit code.
        debug: whether to show tracebacks.
        how_to_continue: how to continue after Ctrl-C.

    Returns:
        What ``run`` returned, 2 for a wrong request or its data, 1 for a run that failed, 130 for Ctrl-C, 143 for
        SIGTERM.
    """
    silence_rename_warnings()
    os.environ["MPLBACKEND"] = "agg"  # pictures go into files; what else is named there may not exist
    open_what_is_closed()
    try:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of few characters must not end a run
        if sys.flags.optimize >= 2:
            raise UserError(_NO_DOCSTRINGS)
        with _hooks(debug, how_to_continue):
            try:
                code = run()
            except SystemExit:  # of --help
                _flush()
                raise
            _flush()
            return code
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        _lead_nowhere(sys.stdout)
        return FAILED
    except (Exception, KeyboardInterrupt, Stopped) as error:
        line, code = _line_and_code(error, how_to_continue)
        if debug:
            print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        if line:  # of several processes that stop together, one speaks
            asked_for = isinstance(error, KeyboardInterrupt | Stopped)  # and no error
            with suppress(OSError):  # there may be nobody left to read it
                print(redact(("" if asked_for else "error: ") + _readable(line)), file=sys.stderr)
        return code


@contextmanager
def importing() -> Iterator[None]:
    """For what writes nothing yet: Ctrl-C says so. No garbage is collected meanwhile, a fifth of the time: nearly all
    that is made stays, and later collections leave it alone."""
    gc.disable()
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"stopped by Ctrl-C; {NOTHING_WRITTEN}", INTERRUPTED) from None
    finally:
        gc.freeze()
        gc.enable()


def _flush() -> None:
    """Write what standard output still holds while an error of it can be told: Python's exit has no words for it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = OUTPUT
        _lead_nowhere(sys.stdout)
        raise


def _lead_nowhere(stream: TextIO) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def silence_rename_warnings() -> None:
    """Leave out what libraries say of their own renamings in this process: it is for who calls them."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft|torch")


def _readable(line: str) -> str:
    """A message as one line, without the middle of what somebody gave that fills a screen."""
    words = [word if len(word) <= _LONG else f"{word[:100]}...{word[-50:]}" for word in line.split()]
    text = printable(" ".join(words))
    return text if len(text) <= 3 * _LONG else f"{text[:_LONG]} ... {text[-_LONG:]}"


def _line_and_code(error: BaseException, how_to_continue: str) -> tuple[str, int]:
    match error:
        case UserError(__cause__=OSError(errno=errno.EMFILE)):
            return f"{error.__cause__}; {_REMEDIES[errno.EMFILE]}", FAILED
        case UserError(__cause__=OSError(errno=number)) if number in _FAULTS:
            return str(error), FAILED
        case UserError() | RunFailed() | Stopped():
            return str(error), error.code
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] != __package__.partition(".")[0]:
            return lacks(name), WRONG_REQUEST
        case KeyboardInterrupt():
            return f"stopped by Ctrl-C; {how_to_continue}", INTERRUPTED
        case RuntimeError() if "determine home directory" in str(error):  # by pathlib, for ~name/file
            return f"{_strangers_path()}: {_NO_SUCH_HOME}" if "HOME" in os.environ else _NO_HOME, WRONG_REQUEST
        case OSError(errno=int()):  # as a rule a disk that is full or may not be written to
            where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
            remedy = _REMEDIES.get(error.errno or 0, "--debug shows where")
            if error.filename == OUTPUT:
                return f"{where}{error.strerror}; {remedy}", FAILED
            return f"{where}{error.strerror}; {remedy}; {how_to_continue}", FAILED
    # The boundary of the program: whatever got here is a defect of ours or of the machine.
    words = textwrap.shorten(str(error), 400, placeholder=" ...") or "no message"
    return f"{type(error).__name__}: {words}; --debug shows where", FAILED


def _strangers_path() -> str:
    """The path below the home of nobody, with its flag, where the command line has it: the error does not name it."""
    words = [part for word in sys.argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for before, word in pairwise(words):
        if word.startswith("~") and os.path.expanduser(word) == word:
            return f"{before} {word}" if before.startswith("--") else word
    return "a path"


@contextmanager
def _hooks(debug: bool, how_to_continue: str) -> Iterator[None]:
    """What a program does in the place of Python, for as long as the context lasts.

    SIGTERM becomes an exception, so that temporary files are removed on the way out; by itself it ends a process where
    it stands. SIGUSR1, by which SLURM announces the end of a job's time, would do the same: outside of training, which
    has a handler of its own, nothing is there to save, and the rest of the time may suffice. And a thread that could
    not write prints no traceback: TensorBoard's hands the error on to the run, which
    tells it.
    """

    def terminate(number: int, frame: object) -> None:
        # Alone: the others may not have heard of it, and to wait for them would hold all.
        raise Stopped(f"stopped by SIGTERM; {how_to_continue}", TERMINATED, alone=True)

    def tell(about: threading.ExceptHookArgs) -> None:
        if debug or not issubclass(about.exc_type, OSError):
            told(about)

    def go_on(number: int, frame: object) -> None:
        with suppress(OSError):  # by no stream of Python's: one may be in the middle of a write
            os.write(2, b"SIGUSR1: nothing is being trained that could be saved; goes on\n")

    told, threading.excepthook = threading.excepthook, tell
    handlers: dict[int, Any] = {signal.SIGTERM: terminate}
    if "SLURM_JOB_ID" in os.environ and hasattr(signal, "SIGUSR1"):
        handlers[signal.SIGUSR1] = go_on
    on_main = threading.current_thread() is threading.main_thread()  # no other thread may say what signals do
    previous = {number: signal.signal(number, act) for number, act in handlers.items()} if on_main else {}
    try:
        yield
    finally:
        threading.excepthook = told
        for number, handler in previous.items():
            signal.signal(number, handler)
