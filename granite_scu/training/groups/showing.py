"""What people see of a run: a line while it trains, and at its end the scores, answers and samples."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import lightning as L

from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.final_score import FinalScore
from granite_scu.training.callbacks.progress import ProgressLine
from granite_scu.training.groups.ending import Ending
from granite_scu.training.groups.measuring import Measuring
from granite_scu.training.prepared_run import PreparedRun, validations

log = logging.getLogger(__name__)


class Showing(NamedTuple):
    """What comes at the end, in its order."""

    final: FinalScore
    samples: L.Callback | None


def progress_line(run: PreparedRun) -> ProgressLine:
    """The line that a running training shows."""
    return ProgressLine(
        run.request.trainer["log_every_n_steps"],
        run.console,
        lambda done: validations(run.length.steps, done, run.intervals.validation),
        run.scored_blocks / max(1, run.validation_blocks),
    )


def showing(
    run: PreparedRun,
    final_score: Callable[..., FinalScore],
    questions: Callable[..., L.Callback] | None,
    ends: Ending,
    measured: Measuring,
    best: BestAdapter,
    line: ProgressLine,
) -> Showing:
    """The callbacks that score and ask, made by ``final_score`` and ``questions``."""
    final = final_score(
        run.folder,
        run.console,
        best,
        measured.stopwatch,
        measured.control.monitor,
        run.setpoint,
        measured.reachability,
        [stopper for stopper in ends if stopper],
        measured.drift,
    )
    count = run.request.run.samples
    if not questions or not count:
        return Showing(final, None)
    if run.machine.sharded:  # no process has all of the weights
        log.info("--fsdp: no question is asked at the end; granite-scu eval asks them")
        return Showing(final, None)
    return Showing(final, questions(run.folder, run.console, run.tokenizer, count, final, line))
