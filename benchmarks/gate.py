"""Sides of a comparison, each in a process of its own, of which one at a time works.

A side loads what it needs and calls ``Gate.wait`` before every unit of work; the parent opens one gate after another.
So times are taken in turn, in one run, and each process's memory is its own.
"""

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from granite_scu.cli import exit_codes
from granite_scu.config.errors import RunFailed
from granite_scu.hardware.detection import peak_memory, reset_peak_memory

GIB = 2**30
PATIENCE = 20
"""Seconds that a process has to end by itself."""

Side = tuple[Callable[..., None], tuple]
"""A function of the module it is imported from, called with a ``Gate``, and its further arguments."""


class Over(BaseException):
    """The parent has closed the gate for good: the side unwinds, past whatever catches errors in it."""


class Gate:
    """A side's end: what it calls to be timed.

    Args:
        connection: to the parent.
        device: "cpu" or "cuda".
    """

    def __init__(self, connection: Connection, device: str) -> None:
        self.connection, self.device = connection, device
        self._since: float | None = None
        self._computed = 0.0
        self._before: int | None = None

    def wait(self, report: Callable[[], dict[str, Any]] = dict) -> None:
        """End a unit of work, the first time the loading, and wait for the next.

        Args:
            report: further facts about the unit; making them is not timed.
        """
        if self._since is None:
            self._before = reset_peak_memory(self.device)
            self.connection.send({})
        else:
            synchronize(self.device)
            seconds, most = time.perf_counter() - self._since, peak_memory(self.device)
            computed = time.thread_time() - self._computed
            extra = None if most is None or self._before is None else max(0, most - self._before) / GIB
            self.connection.send({"seconds": seconds, "computed": computed, "extra_gb": extra, **report()})
        try:
            self.connection.recv()
        except EOFError:
            raise Over from None
        self._since, self._computed = time.perf_counter(), time.thread_time()


@dataclass
class Outcome:
    """What a side did.

    Attributes:
        reports: of its units of work, in order; the first one warms up.
        reason: why it did not get to the end; null when it did.
    """

    reports: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None

    @property
    def seconds(self) -> float | None:
        """Median time of a unit of work."""
        times = [report["seconds"] for report in self.reports[1:]]
        return None if self.reason or not times else statistics.median(times)

    @property
    def computed(self) -> float | None:
        """Median time that the side's thread computed in a unit of work, without what it waited for others."""
        times = [report["computed"] for report in self.reports[1:]]
        return None if self.reason or not times else statistics.median(times)

    @property
    def extra_gb(self) -> float | None:
        """Most memory that the work took on top of what was loaded, in GiB."""
        return None if self.reason or not self.reports else self.reports[-1]["extra_gb"]


def race(sides: dict[str, Side], device: str, repeats: int, advance: Callable[[], None] = lambda: None) -> dict:
    """Let the sides work in turn, each once to warm up and ``repeats`` times to be timed.

    Args:
        sides: by name, in the order of their turns.
        device: "cpu" or "cuda".
        repeats: timed units of work of each side.
        advance: called after each round.

    Returns:
        The ``Outcome`` of each side. One that fails, for want of memory say, leaves the others to go on.
    """
    outcomes = {name: Outcome() for name in sides}
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(Child(*side, device)) for name, side in sides.items()}
        turns: list[Callable[[Child], Any]] = [Child.loaded, *[Child.work] * (1 + repeats)]
        for turn in turns:
            for name, child in children.items():
                if outcomes[name].reason is None:
                    _take(turn, child, outcomes[name])
            advance()
    return outcomes


def _take(turn: Callable, child: "Child", outcome: Outcome) -> None:
    try:
        report = turn(child)
    except RunFailed as error:
        outcome.reason = str(error)
        child.close()  # its memory is the others'
    else:
        outcome.reports += [report] if report else []


class Child:
    """The parent's end of a side: its process, which ends with the ``with`` statement."""

    def __init__(self, side: Callable[..., None], arguments: tuple, device: str) -> None:
        # Not forked: a child would start with the parent's memory, and CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._connection, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end, device, side, arguments), daemon=True)
        self._process.start()
        its_end.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def loaded(self) -> dict[str, Any]:
        """Wait until the side stands at its gate."""
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RunFailed(f"its process ended with code {code}" + " (out of memory?)" * (code == -9)) from None
        if isinstance(answer, str):
            raise RunFailed(answer)
        return answer

    def work(self) -> dict[str, Any]:
        """Let the side do one unit of work, and wait for its report."""
        with contextlib.suppress(BrokenPipeError):  # the answer below says how it ended
            self._connection.send("go")
        return self.loaded()

    def close(self) -> None:
        """End the process: at its gate it may clean up, in the midst of its work it is killed after a while."""
        self._connection.close()
        self._process.join(PATIENCE)
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, device: str, side: Callable[..., None], arguments: tuple) -> None:
    os.dup2(2, 1)  # the parent's stdout is for the result alone
    # One GPU for each side: of several, Hugging Face's Trainer would take all and multiply the batch.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    exit_codes.silence_rename_warnings()
    try:
        side(Gate(connection, device), *arguments)
        connection.send("it ended before its last turn")
    except (Over, KeyboardInterrupt):
        pass
    except Exception as error:
        connection.send(" ".join(f"{type(error).__name__}: {error}".split())[:300])


def synchronize(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
