"""The controller of a run: refused early where no text and no length can change it, settled when both are known."""

import logging
import math
from typing import Any

from granite_scu import control
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import (
    ControlConfig,
    RunConfig,
    check_drift,
    check_refused,
    holding_drift,
    intervals_of,
)
from granite_scu.control.diagnostics.equilibrium import Equilibrium
from granite_scu.storage.recording import read_recording

_log = logging.getLogger(__name__)


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


def first_law(request: Request, controller: control.Controller | None) -> control.Controller:
    """The law as the request alone has it; ``controller`` steers in place of the one that it describes.

    Raises:
        UserError: there is none such, or nothing would settle under it where the run is to stop at equilibrium.
    """
    law = controller or build_controller(request.control)
    if request.run.stop_at_equilibrium:
        check_equilibrium_stop(request.control)
    return law


def settle_law(
    request: Request, controller: control.Controller | None, steps: int
) -> tuple[Request, control.Controller]:
    """The law of a run of so many optimizer steps, which holds drift where a budget is given; the request with that.

    Args:
        request: what is asked for.
        controller: steers in place of the one that ``request.control`` describes.
        steps: optimizer steps of the run.

    Raises:
        UserError: it could do nothing in such a run.
    """
    every = request.control.every
    law = controller or build_controller(request.control, steps)
    validation = intervals_of(request.run, steps).validation
    check_length(law, request.control, request.run, request.data.stream, steps, validation)
    if request.drift.max_drift:
        check_drift(every, steps)
        law = drift_law(request)
        request = with_bounds(request, law)
    if law.needs_slopes:
        check_slopes(every, steps)
    return request, law


def drift_law(request: Request) -> control.PI:
    """The law that holds S, as it holds drift."""
    assert isinstance(request.drift.max_drift, float)
    own = {name for name in vars(request.control) if f"control.{name}" in request.given}
    law = build_controller(holding_drift(request.control, request.drift.max_drift, own))
    assert isinstance(law, control.PI)
    return law


def with_bounds(request: Request, law: control.PI) -> Request:
    """The request with the bounds that lambda has: all that its YAML says counts as given when the run continues."""
    return request.with_values({f"control.{name}": getattr(law, name) for name in ("lambda_min", "lambda_max")})


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


def without_validation(request: Request, law: control.Controller) -> Request:
    """The request for a run that validates on nothing: plain LoRA, unless its law needs no held-out text.

    Raises:
        UserError: it asks for what validation alone can tell.
    """
    run, config = request.run, request.control
    if run.early_stopping is not None:
        raise UserError(
            f"--early-stopping {run.early_stopping}: acts by validations, and nothing is held out to validate on "
            "(--held-out-share 0); leave it out, or give --validation-data"
        )
    check_refused(config.controller, law, ["--held-out-share 0"])
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
        reason = "follows no setpoint, so nothing settles"
        raise UserError(f"--stop-at-equilibrium: --controller {config.controller} {reason}; use --early-stopping")
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


def check_length(
    law: control.Controller, config: ControlConfig, run: RunConfig, streamed: bool, steps: int, eval_steps: int
) -> None:
    """Refuse what could do nothing in a run of so many optimizer steps.

    Raises:
        UserError: a law that says so of itself; an equilibrium whose window is as long as the run or nearly; early
            stopping more patient than the run is long.
    """
    ticks = math.ceil(steps / config.every)
    if streamed:
        check_refused(config.controller, law, ["--stream"])
    if fits := getattr(law, "check_length", None):
        try:
            fits(ticks, _validations_before_the_last(eval_steps, steps))
        except ValueError as error:
            raise UserError(f"--controller {config.controller}: {error}") from error
    window = run.stop_at_equilibrium
    if window and window >= ticks:
        raise UserError(
            f"--stop-at-equilibrium {window}: {steps} steps have {ticks} ticks, so that it could never stop the run; "
            "set fewer, a smaller --control-every, or leave it out"
        )
    if run.early_stopping:
        _check_patience(run.early_stopping, eval_steps, steps)


def _validations_before_the_last(eval_steps: int, steps: int) -> int:
    return (steps - 1) // eval_steps


def _check_patience(patience: int, eval_steps: int, steps: int) -> None:
    counted = _validations_before_the_last(eval_steps, steps)
    if counted <= patience:  # the first validation has none to fall behind
        most = (steps - 1) // (patience + 1)
        denser = f"an --eval-steps of at most {most}, " if most else ""
        raise UserError(
            f"--early-stopping {patience}: {steps} steps hold {counted} validations before the last, so that it could "
            f"never stop the run; set {denser}fewer, or leave it out: the best adapter is kept anyway"
        )
