"""The controller of a run: refused early where no text and no length can change it, settled when both are known."""

import math

from granite_scu import control
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import (
    ControlConfig,
    RunConfig,
    check_drift,
    check_slopes,
    holding_drift,
    intervals_of,
)


def build_controller(config: ControlConfig, total_steps: int | None = None) -> control.Controller:
    """The controller that the configuration names.

    Args:
        config: of the controller.
        total_steps: optimizer steps of the run; None where they are not yet known.
    """
    law = config.law()
    short = isinstance(law, control.AutoSetpoint) and total_steps is not None
    return law.in_a_run_of(total_steps // config.every) if short else law


def settle_law(request: Request, steps: int) -> tuple[Request, control.Controller]:
    """The law of a run of so many optimizer steps, which holds drift where a budget is given; the request with that.

    Args:
        request: what is asked for.
        steps: optimizer steps of the run.

    Raises:
        UserError: it could do nothing in such a run.
    """
    every = request.control.every
    law = build_controller(request.control, steps)
    validation = intervals_of(request.run, steps).validation
    check_length(law, request.control, request.run, steps, validation)
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
        fewer = f"set --batch-size {blocks // processes}, " if blocks >= processes else ""
        raise UserError(
            f"--target-s auto: a tick reads a micro-batch of {batch_size} validation blocks{each}, and the text makes "
            f"{blocks}; give more text or --validation-data, {fewer}give a setpoint, such as --target-s 0.1, or train "
            "plain LoRA: --controller none"
        )


def check_length(law: control.Controller, config: ControlConfig, run: RunConfig, steps: int, eval_steps: int) -> None:
    """Refuse what could do nothing in a run of so many optimizer steps.

    Raises:
        UserError: a law that says so of itself; an equilibrium whose window is as long as the run or nearly; early
            stopping more patient than the run is long.
    """
    ticks = math.ceil(steps / config.every)
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
