"""Processes that do many runs: importing torch takes ten seconds, and so is done once in each."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context


@contextmanager
def workers(jobs: int, initializer: Callable[[], None]) -> Iterator[ProcessPoolExecutor]:
    """So many processes of one thread each. None outlives the block.

    They are killed where the block ends by an error: a run would take a signal as a wish to end in good order.

    Args:
        jobs: processes.
        initializer: is called in each before its first run.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers: processes with several threads each wait for one another
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=initializer) as pool:
        try:
            yield pool
        except BaseException:
            for worker in active_children():
                worker.kill()
            raise
