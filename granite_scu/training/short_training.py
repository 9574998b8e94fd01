"""A few steps of a run ahead of it, to find something out. They leave no file and no random state."""

import gc
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from granite_scu.storage.checkpoint import AdapterCheckpointIO
from granite_scu.training.prepared_run import PreparedRun, build_module
from granite_scu.training.trainer import TimeLimit, build_trainer, fit


def short_training(run: PreparedRun, steps: int, eval_steps: int, callbacks: list[L.Callback], **changed: Any) -> None:
    """Train a fresh adapter over the first steps of the run, and let go of it.

    Model, data, order, seed and learning rates are the run's. Nothing is compiled: what is compiled takes no less
    memory, and minutes.

    Args:
        run: the run.
        steps: optimizer steps.
        eval_steps: optimizer steps between validations.
        callbacks: what finds something out.
        changed: arguments of Lightning's Trainer that differ from the run's.
    """
    settings = run.request.trainer | {"callbacks": None, "logger": None} | changed
    max_time = settings["max_time"]
    with isolate_rng():
        module = build_module(run, compile=False)
        try:
            module.configure_model()
            trainer = build_trainer(
                settings,
                run.machine,
                steps=steps,
                eval_steps=eval_steps,
                callbacks=[*([TimeLimit(max_time)] if max_time else []), *callbacks],
                loggers=[],
                plugin=AdapterCheckpointIO(module),
            )
            fit(trainer, module, run.data, None)
        finally:
            run.data.release_trainer()
            module = trainer = None
            gc.collect()
            if run.machine.accelerator == "cuda":
                torch.cuda.empty_cache()
