"""``--target-s auto``: train a while without lambda, see how far S grows, and propose a setpoint from that."""

import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.seed import isolate_rng

from granite_scu import control
from granite_scu.config.settings import ControlConfig
from granite_scu.control.diagnostics.setpoint import (
    LEAST_STEPS,
    Free,
    Point,
    Proposal,
    extrapolate,
    probe_steps,
    propose_setpoint,
    turn,
)
from granite_scu.errors import Diverged, UserError
from granite_scu.storage import checkpoint
from granite_scu.training.callbacks.progress import ProgressLine
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.stopwatch import Stopwatch
from granite_scu.training.callbacks.ticks import AfterTick
from granite_scu.training.preflight import cumulated_rates
from granite_scu.training.trainer import TimeLimit, build_trainer

if TYPE_CHECKING:
    from granite_scu.training.recipe import Run

log = logging.getLogger(__name__)

AUTO, STAND_IN = "auto", 0.5

TICKS = 20
"""Measurements of S in a probe, about."""

VALIDATIONS, BATCHES = 4, 8
"""Validations in a probe, and the most batches of each."""


@dataclass(frozen=True)
class Found:
    """What a probe measured and what follows from it; goes into ``scu_config.json`` and ``training_config.json``."""

    steps: int
    seconds: float
    free: Free
    validations: tuple[tuple[int, float], ...]
    proposal: Proposal


def needed(config: ControlConfig) -> bool:
    """Whether there is a setpoint to look for: the law heeds one, and none is given."""
    return config.target_s == AUTO and config.controller in control.TRACKING


def check_length(steps: int) -> None:
    """Refuse a run whose probe could tell nothing.

    Raises:
        UserError: it has too few steps.
    """
    if steps < LEAST_STEPS:
        raise UserError(
            f"--target-s auto: a probe takes {LEAST_STEPS} steps at least, and the run has {steps}; give the setpoint "
            "as a number, or train for longer"
        )


def provisional(config: ControlConfig) -> ControlConfig:
    """The configuration with a setpoint that stands for the one still to be found, to check everything else by.

    Raises:
        UserError: the measure is one that a probe says nothing about.
    """
    if needed(config) and config.measure == "factors":
        raise UserError(
            "--measure factors: is not 0 before training, so no probe can say what it grows to; give --target-s as a "
            "ratio"
        )
    return replace(config, target_s=STAND_IN) if config.target_s == AUTO else config


class _Listener(AfterTick):
    """Keeps the ticks and validations of the probe, on every rank."""

    def __init__(self, control: ShannonControl, moved: Sequence[float]) -> None:
        super().__init__(control)
        self.moved = moved
        self.points: list[Point] = []
        self.validations: list[tuple[int, float]] = []
        self.seconds = 0.0

    def on_tick(self, trainer: L.Trainer, module: L.LightningModule, record: dict) -> None:
        self.points.append(Point(record["step"], self.moved[record["step"]], record["param_bpt"], record["data_bpt"]))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.validations.append((trainer.global_step, module.val_bpt))


class _Line(ProgressLine):
    """The live line only; what remains would read like the run's."""

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        pass


def find_setpoint(run: "Run") -> Found:
    """Train a fresh adapter without lambda over the first steps of the run, and propose a setpoint.

    Model, data, order, seed and learning rates are the run's. Nothing of it is left: no file, no random state. Its time
    counts against ``--max-time``. Every rank calls this and gets the same.

    Raises:
        UserError: the probe leaves the run no time.
        Diverged: the probe could measure nothing.
    """
    steps = probe_steps(run.plan.steps)
    log.info(
        "--target-s auto: a probe of %d steps without lambda comes first, %.0f %% on top of the run's %d, which then "
        "starts afresh",
        steps,
        100 * steps / run.plan.steps,
        run.plan.steps,
    )
    with isolate_rng():
        listener = _train(run, steps)
    if run.machine.accelerator == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _require_time_left(run.request.trainer["max_time"], steps, listener.seconds)
    moved = cumulated_rates(run.request.optimizer, run.plan.steps)
    try:
        free = extrapolate(listener.points, moved[-1])
    except ValueError as error:
        raise Diverged(f"--target-s auto: {error}; give a setpoint as a number") from error
    at_turn = _s_at(turn(listener.validations), listener.points)
    proposal = propose_setpoint(free, run.plan.steps, at_turn)
    return Found(steps, listener.seconds, free, tuple(listener.validations), proposal)


def _s_at(step: int | None, points: Sequence[Point]) -> float | None:
    """S at the tick nearest to that step, of those that measured it."""
    measured = [point for point in points if math.isfinite(point.s)]
    return None if step is None else min(measured, key=lambda point: abs(point.step - step)).s


def _require_time_left(max_time: Any, steps: int, spent: float) -> None:
    left = TimeLimit(max_time, spent).time_remaining()
    if left is not None and left <= 0:
        raise UserError(
            f"--max-time {max_time}: is used up by the probe of --target-s auto ({steps} steps), which it covers too; "
            "allow more, or give the setpoint as a number"
        )


def _train(run: "Run", steps: int) -> _Listener:
    """Train the probe and let go of it; returns what it measured, the same on every rank."""
    module = run.make_module(compile=False)
    module.configure_model()
    every = max(1, steps // TICKS)
    stopwatch, clock = Stopwatch(), Timer()
    scu = ShannonControl(control.NoControl(), every, stopwatch)
    listener = _Listener(scu, cumulated_rates(run.request.optimizer, run.plan.steps))
    settings = run.request.trainer
    settings = settings | {
        "callbacks": None,
        "logger": None,
        "limit_val_batches": min(settings["limit_val_batches"], BATCHES),
    }
    trainer = build_trainer(
        settings,
        run.machine,
        steps=steps,
        eval_steps=max(1, steps // VALIDATIONS),
        callbacks=[clock, stopwatch, scu, listener, _Line(scu, steps + 1, run.console)],
        loggers=[],
        plugin=checkpoint.AdapterCheckpointIO(),
    )
    run.train(trainer, module, None)
    # The measurements are reduced over ranks already; rank 0's word rules out any last bit of difference.
    found = (listener.points, listener.validations, clock.time_elapsed())
    listener.points, listener.validations, listener.seconds = trainer.strategy.broadcast(found)
    run.data.trainer = None  # it would keep the model, and the model the device's memory
    del module, trainer
    gc.collect()
    return listener


def as_json(found: Found) -> dict:
    """For the run folder."""
    validations = [{"step": step, "val_bpt": bpt} for step, bpt in found.validations]
    spent = {"probe_steps": found.steps, "probe_time_s": found.seconds}
    return {**spent, "s_free": asdict(found.free), "validations": validations}
