"""Processes that do many runs: importing torch takes ten seconds, and so is done once in each."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from threading import Thread

from granite_scu.config.own_python import NOT_FROM_HERE


@contextmanager
def workers(jobs: int, initializer: Callable[[], None]) -> Iterator[ProcessPoolExecutor]:
    """So many processes of one thread each. None outlives the block, nor this process if it is killed.

    They are killed where the block ends by an error: a run would take a signal as a wish to end in good order.

    Args:
        jobs: processes.
        initializer: is called in each before its first run.
    """
    # Of the workers: processes with several threads each wait for one another.
    os.environ |= {"OMP_NUM_THREADS": "1", **NOT_FROM_HERE}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=partial(_begin, initializer)) as pool:
        try:
            yield pool
        except BaseException:
            for worker in active_children():
                worker.kill()
            raise


def _begin(initializer: Callable[[], None]) -> None:
    """Called first in a worker."""
    Thread(target=_end_with_parent, daemon=True).start()
    initializer()


def _end_with_parent() -> None:
    """An executor's worker waits for work for ever, and would keep its memory, where nobody is left to give it any."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
