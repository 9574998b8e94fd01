"""``--target-s auto``: train a while without lambda, see how far S grows, and propose a setpoint from that."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer

from granite_scu import control
from granite_scu.config.errors import Diverged, UserError
from granite_scu.config.settings import ControlConfig
from granite_scu.control.diagnostics.setpoint import (
    LEAST_STEPS,
    Point,
    extrapolate,
    probe_steps,
    propose_setpoint,
    turn,
)
from granite_scu.training.callbacks.progress import ProgressLine
from granite_scu.training.callbacks.shannon_control import ControlTick, ShannonControl
from granite_scu.training.callbacks.stopwatch import Stopwatch
from granite_scu.training.controller import build_controller
from granite_scu.training.learning_rate import cumulated_rates
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.resume import Resume
from granite_scu.training.short_training import short_training
from granite_scu.training.trainer import TimeLimit

log = logging.getLogger(__name__)

AUTO, STAND_IN = "auto", 0.5

TICKS = 20
"""Measurements of S in a probe, about."""

VALIDATIONS, BATCHES = 4, 8
"""Validations in a probe, and the most batches of each."""


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


class _Observer(Timer):
    """Keeps the ticks and validations of the probe and the time it takes, the same on every rank."""

    def __init__(self, moved: Sequence[float]) -> None:
        super().__init__()
        self.moved = moved
        self.points: list[Point] = []
        self.validations: list[tuple[int, float]] = []
        self.seconds = 0.0

    def on_tick(self, tick: ControlTick, trainer: L.Trainer, module: L.LightningModule) -> None:
        record = tick.record
        self.points.append(Point(record["step"], self.moved[record["step"]], record["param_bpt"], record["data_bpt"]))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super().on_validation_end(trainer, module)
        self.validations.append((trainer.global_step, module.val_bpt))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super().on_train_end(trainer, module)
        # The measurements are reduced over ranks already; rank 0's word rules out any last bit of difference.
        found = (self.points, self.validations, self.time_elapsed())
        self.points, self.validations, self.seconds = trainer.strategy.broadcast(found)


class _Line(ProgressLine):
    """The live line only; what remains would read like the run's."""

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        pass


def settle(run: PreparedRun) -> PreparedRun:
    """The run at the checkpoint's setpoint where there is one to continue from, or else at what a probe proposes.

    Raises:
        UserError: the checkpoint has no setpoint, or the probe leaves the run no time.
        Diverged: the probe could measure nothing.
    """
    target, found, seconds = _of_checkpoint(run.resume) if run.resume else _probe(run)
    controller = build_controller(replace(run.request.control, target_s=target), run.length.steps)
    return replace(run, controller=controller, seeks_setpoint=False, found=found, probe_seconds=seconds)


def _of_checkpoint(resume: Resume) -> tuple[float, dict[str, Any], float]:
    """The setpoint that it held, what was written down about it, and the seconds that finding it took."""
    if resume.setpoint is None:
        raise UserError(f"--resume-from-checkpoint {resume.path}: has no setpoint; give --target-s as a number")
    stored = resume.path.parent / "scu_config.json"
    record = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
    return resume.setpoint, record.get("auto") or {"reason": "the checkpoint's"}, 0.0


def _probe(run: PreparedRun) -> tuple[float, dict[str, Any], float]:
    """Train a fresh adapter without lambda over the first steps of the run, and propose a setpoint.

    Model, data, order, seed and learning rates are the run's. Nothing of it is left: no file, no random state. Its time
    counts against ``--max-time``. Every rank calls this and gets the same.

    Returns:
        The setpoint, what is to be written down about it, and the seconds that the probe took.
    """
    steps = probe_steps(run.length.steps)
    log.info(
        "--target-s auto: a probe of %d steps without lambda comes first, %.0f %% on top of the run's %d, which then "
        "starts afresh",
        steps,
        100 * steps / run.length.steps,
        run.length.steps,
    )
    moved = cumulated_rates(run.request.optimizer, run.length.steps)
    observed = _train(run, steps, moved)
    if run.machine.accelerator == "cuda":
        torch.cuda.reset_peak_memory_stats()
    _require_time_left(run.request.trainer["max_time"], steps, observed.seconds)
    try:
        free = extrapolate(observed.points, moved[-1])
    except ValueError as error:
        raise Diverged(f"--target-s auto: {error}; give a setpoint as a number") from error
    at_turn = _s_at(turn(observed.validations), observed.points)
    proposal = propose_setpoint(free, run.length.steps, at_turn)
    found = {
        "reason": proposal.reason,
        "probe_steps": steps,
        "probe_time_s": observed.seconds,
        "s_free": asdict(free),
        "validations": [{"step": step, "val_bpt": bpt} for step, bpt in observed.validations],
    }
    return proposal.target_s, found, observed.seconds


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


def _train(run: PreparedRun, steps: int, moved: Sequence[float]) -> _Observer:
    """Train the probe; returns what it measured, the same on every rank."""
    stopwatch, observer, line = Stopwatch(), _Observer(moved), _Line(steps + 1, run.console)
    every = max(1, steps // TICKS)
    scu = ShannonControl(control.NoControl(), every, stopwatch, listeners=[observer, line])
    batches = min(run.request.trainer["limit_val_batches"], BATCHES)
    eval_steps = max(1, steps // VALIDATIONS)
    short_training(run, steps, eval_steps, [observer, stopwatch, scu, line], limit_val_batches=batches)
    return observer
