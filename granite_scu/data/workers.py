"""Loader processes: the run decides what becomes of a signal, and does without them where they fail."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import psutil
from torch.utils.data import DataLoader, IterableDataset

from granite_scu.config.errors import UserError
from granite_scu.control.units import memory

LOOK = 15.0
"""Seconds without a batch after which the loader processes are looked at."""

PATIENCE = 2 * LOOK
"""Seconds in which they neither give a batch nor compute, after which they are given up. Stored tokens take
milliseconds. Two looks: after a suspension of them all, the first one finds that nothing has been done."""

SHARED_MEMORY = Path("/dev/shm")

_REMEDY = "--num-workers 0 starts none; in a container, docker run --shm-size 1g gives them more memory to share"

_log = logging.getLogger(__name__)


class _Lost(Exception):
    """Why loader processes give no batch, in words that follow their name."""


class SteadyLoader(DataLoader):
    """A DataLoader that gives the same batches whatever becomes of its processes.

    They are deaf to signals from their first moment until they say what becomes of them. Where one is killed, hangs, or
    cannot be started, all are ended, a warning names the remedy, and this process reads the rest itself.

    Args:
        dataset: that reads alike in any process; one without indices has ``batches``, see ``StreamedBlocks``.
        batch_bytes: of the tensors of a batch, which go through shared memory.
        patience: seconds, see ``PATIENCE``.
        settings: of the base class.
    """

    def __init__(self, dataset: Any, *, batch_bytes: int = 0, patience: float = PATIENCE, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self.batch_bytes, self.patience = batch_bytes, patience
        self.processes: list[Any] = []
        self.lost = ""
        self._asked = self._got = 0

    def __iter__(self) -> Any:
        """The batches; the processes are started at once."""
        if not self.num_workers:
            return super().__iter__()
        batches = None
        if not self.lost:
            try:
                batches = self._start()
            except _Lost as why:
                self._give_up(str(why))
        return self._watched(batches)

    def _watched(self, batches: Any) -> Iterator[Any]:
        given, over = 0, threading.Event()
        if batches is not None:
            threading.Thread(target=self._watch, args=[over], daemon=True).start()
        try:
            while batches is not None:
                batch = self._next(batches)
                given += 1
                yield batch
        except StopIteration:
            return
        except _Lost as why:
            self._give_up(str(why))
        finally:
            over.set()
        yield from self._in_this_process(given)

    def _start(self) -> Any:
        """The base class's iterator. Raises _Lost where there is no room for its processes or their batches."""
        ahead = self.num_workers * (self.prefetch_factor or 1) * self.batch_bytes
        if not self.processes and SHARED_MEMORY.is_dir():
            place = os.statvfs(SHARED_MEMORY)
            if place.f_blocks and (free := place.f_bavail * place.f_frsize) < ahead:
                raise _Lost(f"need {memory(ahead)} of {SHARED_MEMORY}, which has {memory(free)} free")
        signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1} if hasattr(signal, "pthread_sigmask") else set()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if signals else set()
        others = active_children()
        deaths = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
        try:
            return super().__iter__()
        except OSError as error:  # semaphores, pipes and processes: each of them may be what there is no room for
            raise _Lost(f"cannot be started ({error.strerror})") from error
        finally:
            self.processes += [process for process in active_children() if process not in others]
            if deaths is not None and threading.current_thread() is threading.main_thread():
                # Torch's own handler would raise in the middle of a step; who waits for a batch finds out as well.
                signal.signal(signal.SIGCHLD, deaths)
            if signals:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _next(self, batches: Any) -> Any:
        """The next batch. Raises _Lost where the processes have ended, and what reading raises in one of them."""
        self._asked += 1
        try:
            return next(batches)
        except (RuntimeError, OSError, EOFError) as error:
            of_theirs = "in DataLoader worker process" in str(error)
            ended = "DataLoader worker (pid" in str(error) or "Pin memory thread" in str(error)
            if of_theirs or (isinstance(error, RuntimeError) and not ended):
                raise
            raise _Lost(self.lost or "were ended by another, as the system does where memory runs out") from error
        finally:
            self._got += 1

    def _watch(self, over: threading.Event) -> None:
        """End processes that neither give a batch that is waited for nor compute, until ``over``. A thread of its own:
        who waits for a process that is suspended may do so in a call that has no limit of time."""
        idle, got, spent = 0.0, self._got, self._spent()
        while not over.wait(LOOK):
            given_before, got, spent_before, spent = got, self._got, spent, self._spent()
            waits = got == given_before and self._asked > got
            idle = idle + LOOK if waits and spent - spent_before < 0.01 * LOOK else 0.0
            if idle >= self.patience:
                self.lost = f"have done nothing for {idle:.0f} seconds"
                self._kill()
                return
            if waits:
                _log.info("waiting for text from the loader processes, which are %s", "idle" if idle else "at work")

    def _spent(self) -> float:
        """Seconds of processor time that the processes have taken."""
        total = 0.0
        for process in self.processes:
            with suppress(psutil.Error):
                times = psutil.Process(process.pid).cpu_times()
                total += times.user + times.system
        return total

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def _give_up(self, why: str) -> None:
        self.lost = why
        self._kill()
        words = "the loader processes of --num-workers %d %s; the run reads its text without them; %s"
        _log.warning(words, self.num_workers, why, _REMEDY)

    def _in_this_process(self, given: int) -> Iterator[Any]:
        """The batches after the first ``given``."""
        if isinstance(self.dataset, IterableDataset):
            batches = self.dataset.batches(given, self.num_workers)
        else:
            batches = ([self.dataset[i] for i in batch] for batch in islice(self.batch_sampler, given, None))
        return map(self.collate_fn, batches)


def end_loaders() -> None:
    """Kill the loader processes of this process: one that is suspended would let it wait for ever at its exit."""
    for process in active_children():
        process.kill()


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
