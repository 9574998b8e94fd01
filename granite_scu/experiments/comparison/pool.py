"""Worker processes that take runs one after another: importing torch takes ten seconds, and so is done once in each."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from granite_scu.errors import RunFailed, Stopped, UserError
from granite_scu.experiments.comparison.evidence import Spec


@dataclass(frozen=True)
class Finished:
    """What became of a run: a file of evidence, or the reason in words."""

    spec: Spec
    error: str | None = None


class Worker:
    """A process of its own, with one thread.

    Args:
        evidence: folder that it writes records into.
    """

    def __init__(self, evidence: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, evidence), daemon=True)
        self.process.start()
        theirs.close()
        self.spec: Spec | None = None

    def start(self, spec: Spec) -> None:
        self.spec = spec
        with contextlib.suppress(OSError):  # one that has just died: result() says so
            self.connection.send(spec)

    def result(self) -> Finished:
        """What it sent, or that it died."""
        assert self.spec is not None
        spec, self.spec = self.spec, None
        try:
            return Finished(spec, self.connection.recv())
        except (EOFError, OSError):  # the latter where it died before it read what it was sent
            self.process.join()
            return Finished(spec, f"its process ended with code {self.process.exitcode}; out of memory?")

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()


class Pool:
    """So many workers, as a context manager that leaves no process behind.

    Args:
        jobs: workers; each starts with its first run.
        evidence: folder that they write records into.
    """

    def __init__(self, jobs: int, evidence: Path) -> None:
        self.jobs, self.evidence = jobs, evidence
        self.workers: list[Worker] = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self.workers:
            worker.stop()

    @property
    def busy(self) -> list[Spec]:
        """Runs under way."""
        return [worker.spec for worker in self.workers if worker.spec]

    @property
    def has_room(self) -> bool:
        return len(self.busy) < self.jobs

    def start(self, spec: Spec) -> None:
        """Give a run to a worker that is free and alive; there must be room."""
        idle = [worker for worker in self.workers if worker.spec is None and worker.process.is_alive()]
        if not idle:
            idle = [Worker(self.evidence)]
            self.workers += idle
        idle[0].start(spec)

    def finished(self, timeout: float) -> Iterator[Finished]:
        """The runs that have ended; waits for one at most ``timeout`` seconds, and so long where none is under way."""
        waiting: dict[Any, Worker] = {worker.connection: worker for worker in self.workers if worker.spec}
        if not waiting:
            time.sleep(timeout)
            return
        for connection in wait(list(waiting), timeout):
            worker = waiting[connection]
            result = worker.result()
            if not worker.process.is_alive():
                self.workers.remove(worker)
            yield result


def _work(connection: Connection, evidence: Path) -> None:
    """A worker's life: runs from the connection, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    import torch

    from granite_scu.cli import guard
    from granite_scu.cli.console import make_console, quiet
    from granite_scu.experiments.comparison.runs import carry_out

    torch.set_num_threads(1)
    quiet(make_console(stderr=True))
    guard.hush_renamings()
    logging.getLogger("granite_scu").setLevel(logging.WARNING)
    with contextlib.suppress(EOFError), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        while True:
            spec = connection.recv()
            try:
                carry_out(spec, evidence)
                connection.send(None)
            except (Stopped, KeyboardInterrupt):
                # A run that trains has its own handlers, and Lightning turns what _leave raises into an interrupt.
                _leave()
            except (UserError, RunFailed) as error:
                connection.send(str(error))
            except Exception as error:
                # The boundary of a run: the others go on, and the parent reports it at the end.
                connection.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def _leave_with_parent() -> None:
    """Ends this process in the midst of a run when the parent is gone: whoever finds its claim void does that run."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _leave(*_: Any) -> None:
    """Ends by an exception, so that temporary folders are removed."""
    raise SystemExit(143)
