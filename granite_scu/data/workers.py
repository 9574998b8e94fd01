"""Loader processes: the run decides what becomes of a signal, and they serve it to the end; it says what they raise."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from granite_scu.config.errors import UserError


class SteadyLoader(DataLoader):
    """A DataLoader whose processes are deaf to signals from their first moment until they say what becomes of them."""

    def __iter__(self) -> Any:
        """As the base class's, which starts the processes."""
        if not (self.num_workers and hasattr(signal, "pthread_sigmask")):
            return super().__iter__()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_the_run(worker: int) -> None:
    """Have a loader process outlive a signal that is meant for the run. To be called in it, at its start.

    A terminal sends Ctrl-C, torchrun SIGTERM and SLURM both it and SIGUSR1 to every process. The run then ends its
    optimizer step, for which it may need batches, and takes a loader's death for a failure. A SIGTERM of the run's own
    process still ends a loader.

    Args:
        worker: number of the process among the loader's.
    """
    for number in (signal.SIGINT, getattr(signal, "SIGUSR1", None)):
        if number is not None:
            signal.signal(number, signal.SIG_IGN)
    tells_the_sender = hasattr(signal, "sigwaitinfo")  # not on macOS and Windows
    if hasattr(signal, "pthread_sigmask"):  # what SteadyLoader has held back comes now
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM} if tells_the_sender else set())
    if tells_the_sender:
        threading.Thread(target=_end_when_the_run_says, daemon=True).start()


def _end_when_the_run_says() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Of an error that torch hands on from a loader process, with its traceback in the words, the last line alone."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).rsplit(f"{UserError.__name__}: ", 1)[-1].strip()) from error
