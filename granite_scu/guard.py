"""From exceptions to exit codes and one line on stderr."""

import os
import sys
import textwrap
import traceback
from collections.abc import Callable

from granite_scu.errors import RunFailed, UserError

WRONG_REQUEST, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143


GO_ON = "where the run folder holds a checkpoint, --resume-from-checkpoint last goes on from it"


def guarded(run: Callable[[], int], debug: bool, go_on: str = GO_ON, redact: Callable[[str], str] = str) -> int:
    """Call ``run``; an error becomes one line and an exit code, with ``debug`` a traceback too.

    Args:
        run: returns the exit code.
        debug: whether to show tracebacks.
        go_on: how to go on after Ctrl-C.
        redact: takes out of what is printed what nobody may see.

    Returns:
        What ``run`` returned, 2 for a wrong request or its data, 1 for a run that failed, 130 for Ctrl-C.
    """

    def report(error: BaseException, line: str, code: int) -> int:
        if debug:
            print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        print(redact(f"error: {' '.join(line.split())}"), file=sys.stderr)
        return code

    try:
        return run()
    except UserError as error:
        return report(error, str(error), WRONG_REQUEST)
    except RunFailed as error:
        return report(error, str(error), FAILED)
    except KeyboardInterrupt as error:
        return report(error, f"interrupted; {go_on}", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        # The boundary of the program: whatever got here is a defect of ours or of the machine.
        words = textwrap.shorten(str(error), 400, placeholder=" ...") or "no message"
        return report(error, f"{type(error).__name__}: {words}; --debug shows where", FAILED)
