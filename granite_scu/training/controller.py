"""The controller that a configuration names, and the setpoint that it is to hold."""

import logging
import math
from typing import Any

from granite_scu import control
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import ControlConfig, RunConfig, holding_drift
from granite_scu.control.diagnostics.equilibrium import Equilibrium
from granite_scu.storage.recording import read_recording

_log = logging.getLogger(__name__)

LEAST_VALIDATIONS = 10
"""Validations in a run that give cascade the time to measure, and to move its setpoint by decades."""


def build_controller(config: ControlConfig, total_steps: int | None = None) -> control.Controller:
    """The controller that the configuration names; its ValueErrors become the user's.

    Args:
        config: of the controller.
        total_steps: optimizer steps of the run, which a recording must cover; None where they are not yet known.
    """
    recording = {}
    if config.controller == "replay":
        recording = _recording(config, total_steps)
    elif config.replay is not None:
        raise UserError(
            f"--replay {config.replay}: --controller {config.controller} repeats no recording; give --controller "
            "replay, or leave --replay out"
        )
    try:
        law = control.build(config.controller, **config.of_law | recording)
        short = isinstance(law, control.AutoSetpoint) and total_steps is not None
        return law.in_a_run_of(total_steps // config.every) if short else law
    except (TypeError, ValueError) as error:
        raise UserError(f"--controller {config.controller}: {error}") from error


def drift_law(request: Request) -> control.PI:
    """The law that holds S, as it holds drift."""
    assert isinstance(request.drift.max_drift, float)
    own = {name for name in vars(request.control) if f"control.{name}" in request.given}
    law = build_controller(holding_drift(request.control, request.drift.max_drift, own))
    assert isinstance(law, control.PI)
    return law


def _recording(config: ControlConfig, total_steps: int | None) -> dict[str, Any]:
    """What a replay repeats, as its settings."""
    if config.replay is None:
        raise UserError(
            "--replay: --controller replay needs it; give the run folder or scu_history.json whose lambda is repeated"
        )
    try:
        acting = {"actuator": config.actuator, "measure": config.measure}
        return read_recording(config.replay, total_steps, config.every, acting)
    except ValueError as error:
        raise UserError(f"--replay {config.replay}: {error}") from error


def without_validation(request: Request) -> Request:
    """The request for a run that validates on nothing: plain LoRA, unless its law needs no held-out text.

    Raises:
        UserError: it asks for what validation alone can tell.
    """
    run, config = request.run, request.control
    for flag, asked in (
        (f"--early-stopping {run.early_stopping}", run.early_stopping is not None),
        ("--controller cascade", config.controller == "cascade"),
    ):
        if asked:
            raise UserError(
                f"{flag}: acts by validations, and nothing is held out to validate on (--held-out-share 0); leave it "
                "out, or give --validation-data"
            )
    if config.controller != "pi" or config.target_s != control.AUTO or request.drift.max_drift:
        return request
    _log.warning("nothing is held out to validate on, by which S* would be found: plain LoRA (--controller none)")
    return request.with_values({"control.controller": "none"})


def check_equilibrium_stop(config: ControlConfig) -> None:
    """Refuse ``--stop-at-equilibrium`` where no window of ticks can show that a closed loop holds S.

    S does not settle under some controllers. A law with a deadband rests inside it, where it does not answer to S.
    The measure of factors starts above 0, so that how far S has come says nothing of how far the weights moved.

    Raises:
        UserError: it is such a controller or measure, or has a deadband, or a setpoint near 1.
    """
    if config.measure != "delta":
        reason = "judges how far the weights moved by how far S rose from 0, where that measure does not start"
        raise UserError(f"--stop-at-equilibrium: --measure {config.measure}: {reason}; use --early-stopping")
    if not control.tracks(control.find(config.controller)):
        name = config.controller
        reason = "moves its own setpoint, so S never" if name == "cascade" else "closes no loop, so nothing"
        raise UserError(f"--stop-at-equilibrium: --controller {name} {reason} settles; use --early-stopping")
    if config.target_s == control.AUTO:
        raise UserError(
            "--stop-at-equilibrium: --target-s auto moves the setpoint, so S never settles; use --early-stopping, or "
            "give a setpoint, such as 10%"
        )
    if isinstance(config.target_s, float) and (1 + Equilibrium.band) * config.target_s >= 1:
        reason = f"its band of {Equilibrium.band:.0%} reaches to 1, which S cannot cross, so nothing can be shown"
        raise UserError(f"--stop-at-equilibrium: --target-s {config.target_s:g}: {reason}; take at most 0.9")
    own = control.find(config.controller).__dataclass_fields__.get("deadband")
    if own is None:  # a law without one passes it over
        return
    width = own.default if config.deadband is None else config.deadband
    if width > 0:
        whose = f", {config.controller}'s own" if config.deadband is None else ""
        reason = "S that is held lies inside, where the law does not answer to it, and no run would stop"
        raise UserError(f"--stop-at-equilibrium: --deadband {width:g}{whose}: {reason}; set --deadband 0")


def check_slopes(every: int, steps: int) -> None:
    """Refuse ``--target-s auto`` where it could not act.

    Args:
        every: optimizer steps between ticks.
        steps: optimizer steps of the run.

    Raises:
        UserError: the run is no longer than a tick.
    """
    if steps <= every:
        ticks = f"set --control-every to less than {steps}, or " if steps > 1 else ""
        longer = "train for longer (--num-epochs, or fewer --gradient-accumulation-steps)"
        raise UserError(
            f"--target-s auto: acts after each {every} optimizer steps (--control-every), and the run has {steps}; "
            f"{longer}, {ticks}leave the controller out: --controller none"
        )


def check_held_out(blocks: int, batch_size: int, processes: int) -> None:
    """Refuse ``--target-s auto`` where each tick would read less than what it was measured with.

    Args:
        blocks: of validation text.
        batch_size: blocks of a micro-batch in a process.
        processes: how many train.

    Raises:
        UserError: the text fills no micro-batch.
    """
    if blocks < batch_size * processes:
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"--target-s auto: a tick reads a micro-batch of {batch_size} validation blocks{each}, and the text makes "
            f"{blocks}; give more text, set --batch-size {blocks // processes}, give a setpoint, such as --target-s "
            "0.1, or leave the controller out: --controller none"
        )


def check_length(config: ControlConfig, run: RunConfig, streamed: bool, steps: int, eval_steps: int) -> None:
    """Refuse what could do nothing in a run of so many optimizer steps.

    Raises:
        UserError: cascade without the validations that it moves by, or in a stream; CPR whose warm-up, or an
            equilibrium whose window, is as long as the run or nearly; early stopping more patient than the run is long.
    """
    law, every = config.controller, config.every
    ticks = math.ceil(steps / every)
    if law == "cascade":
        if streamed:
            raise UserError(
                "--controller cascade: looks ahead in the training text, which --stream cannot; choose another"
            )
        _check_validations(max(eval_steps, every), steps)  # what a tick finds is the newest validation
    warmup = config.cpr_warmup or control.CPR.cpr_warmup
    # At the tick that takes the bounds no matrix exceeds them yet, and after the last tick no step is left to act on.
    if law == "cpr" and config.cpr_bound is None and warmup > ticks - 2:
        shorter = f"--control-every, or a --cpr-warmup of at most {ticks - 2}" if ticks > 2 else "--control-every"
        raise UserError(
            f"--controller cpr: takes its bounds after {warmup} ticks of {every} steps and would do nothing in {steps} "
            f"steps; give --cpr-bound, set a smaller {shorter}, or train for longer"
        )
    window = run.stop_at_equilibrium
    if window and window >= ticks:
        raise UserError(
            f"--stop-at-equilibrium {window}: {steps} steps have {ticks} ticks, so that it could never stop the run; "
            "set fewer, a smaller --control-every, or leave it out"
        )
    if run.early_stopping:
        _check_patience(run.early_stopping, eval_steps, steps)


def _check_patience(patience: int, eval_steps: int, steps: int) -> None:
    counted = (steps - 1) // eval_steps
    if counted <= patience:  # the first validation has none to fall behind
        most = (steps - 1) // (patience + 1)
        denser = f"an --eval-steps of at most {most}, " if most else ""
        raise UserError(
            f"--early-stopping {patience}: {steps} steps hold {counted} validations before the last, so that it could "
            f"never stop the run; set {denser}fewer, or leave it out: the best adapter is kept anyway"
        )


def _check_validations(every: int, steps: int) -> None:
    counted = (steps - 1) // every
    if counted < LEAST_VALIDATIONS:
        most = (steps - 1) // LEAST_VALIDATIONS
        denser = f"set --eval-steps and --control-every to at most {most}, or " if most else ""
        raise UserError(
            f"--controller cascade: moves its setpoint at validations and takes {LEAST_VALIDATIONS} at least, and "
            f"{steps} steps hold {counted}; {denser}train for longer"
        )
