"""What keeps a run: the best adapter so far, checkpoints, and one more of them where a signal stops it."""

from typing import NamedTuple

from granite_scu.storage.run_folder import BEST_ADAPTER
from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.checkpoints import Checkpoints
from granite_scu.training.callbacks.signals import GracefulStop
from granite_scu.training.groups.measuring import Measuring
from granite_scu.training.prepared_run import PreparedRun


class Keeping(NamedTuple):
    """In their order."""

    best: BestAdapter
    checkpoints: Checkpoints
    stop: GracefulStop


def keeping(run: PreparedRun, measured: Measuring, resume_command: str) -> Keeping:
    """The callbacks that save; ``resume_command`` is the command that continues the run."""
    drift, stopwatch = measured.drift, measured.stopwatch
    best = BestAdapter(run.folder.path / BEST_ADAPTER, drift and drift.budget, drift and drift.share)
    every, keep = run.intervals.checkpoint, run.request.run.keep
    checkpoints = Checkpoints(run.folder, every, run.validation_interval, keep, stopwatch, run.course)
    return Keeping(best, checkpoints, GracefulStop(run.folder, checkpoints.save, resume_command))
