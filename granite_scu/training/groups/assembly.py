"""The Trainer of a run, with its callbacks in their order."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from granite_scu.storage.checkpoint import AdapterCheckpointIO
from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.final_score import FinalScore
from granite_scu.training.groups.ending import ending
from granite_scu.training.groups.keeping import keeping
from granite_scu.training.groups.measuring import measuring
from granite_scu.training.groups.showing import progress_line, showing
from granite_scu.training.module import GraniteModule
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.trainer import build_trainer


class Assembled(NamedTuple):
    """The Trainer, and those of its callbacks that the recipe speaks to."""

    trainer: L.Trainer
    best: BestAdapter
    final: FinalScore


def assemble(
    run: PreparedRun,
    module: GraniteModule,
    final_score: Callable[..., FinalScore],
    questions: Callable[..., L.Callback] | None,
    resume_command: str,
    loggers: Sequence[Logger],
) -> Assembled:
    """The Trainer; each group of callbacks comes after those whose work it needs.

    What may end the run comes before what measures, so that a tick after the time is over decides nothing. What is
    measured and shown comes before the checkpoints, which have the state of all, and the results come last.
    """
    ends, line = ending(run), progress_line(run)
    measured = measuring(run, [*([ends.equilibrium] if ends.equilibrium else []), line])
    kept = keeping(run, measured, resume_command)
    shown = showing(run, final_score, questions, ends, measured, kept.best, line)
    callbacks = [*ends, *measured, line, *kept, *shown]
    trainer = build_trainer(
        run.request.trainer,
        run.machine,
        steps=run.length.steps,
        eval_steps=run.validation_interval,
        callbacks=[callback for callback in callbacks if callback],
        loggers=[*_files(run.folder.path / "logs", f"from-{run.resume.path.name}" if run.resume else ""), *loggers],
        plugin=AdapterCheckpointIO(module),
    )
    return Assembled(trainer, kept.best, shown.final)


def _files(logs: Path, leg: str) -> list[Logger]:
    # Each leg of the run has a file of its own: the CSV logger would delete the one it finds.
    # Written at once, so that a crash loses no validation.
    csv = CSVLogger(logs, name="csv", version=leg, flush_logs_every_n_steps=1)
    return [TensorBoardLogger(logs, name="tensorboard", version=""), csv]
