"""As many threads as there are cores that nobody else keeps busy."""

import logging
import os
from typing import Any

import lightning as L
import torch

from granite_scu.hardware.detection import CompetingLoad, allowed, threads_left

log = logging.getLogger(__name__)

EVERY = 2.0
"""Seconds between two looks at the other load."""


def may_change(accelerator: str, deterministic: bool) -> bool:
    """Whether the number of threads is ours to choose: on a CPU, unless the user fixed it.

    Another number adds in another order, so that last bits differ: ``--deterministic`` fixes it, and so does
    OMP_NUM_THREADS.
    """
    return accelerator == "cpu" and not deterministic and "OMP_NUM_THREADS" not in os.environ


class FreeCores(L.Callback):
    """Gives up a thread for each core that other processes keep busy, and takes it back when they are done.

    Args:
        load: says how busy they are; from now on where it is None.
    """

    def __init__(self, load: CompetingLoad | None = None) -> None:
        self._load, self._cores, self._told = load or CompetingLoad(), allowed(), False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._adapt()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if self._load.seconds >= EVERY:
            self._adapt()

    def _adapt(self) -> None:
        others = self._load.read()
        threads = threads_left(others, self._cores)
        if threads == torch.get_num_threads():
            return
        torch.set_num_threads(threads)
        if not self._told and threads < self._cores:
            log.info(
                "other processes keep %.1f of %d cores busy: training continues in %d thread%s while they do",
                *(others, self._cores, threads, "s" * (threads != 1)),
            )
            self._told = True
