"""The controller of a run: refused early where no text and no length can change it, settled when both are known."""

import math

from granite_scu import control
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import ControlConfig, RunConfig, check_drift, intervals_of


def settle_law(request: Request, steps: int) -> tuple[Request, control.Controller]:
    """The law of a run of so many optimizer steps, which holds drift where a budget is given; the request with that.

    Args:
        request: what is asked for.
        steps: optimizer steps of the run.

    Raises:
        UserError: it could do nothing in such a run.
    """
    every, run = request.control.every, request.run
    validation = intervals_of(run, steps).validation
    check_stops(run, every, steps, validation)
    if request.drift.max_drift:
        check_drift(every, steps)
        law = request.control_held.law()
        assert isinstance(law, control.PI)
        return with_bounds(request, law), law
    return request, law_of_length(request.control, steps, validation)


def law_of_length(config: ControlConfig, steps: int, eval_steps: int) -> control.Controller:
    """The law as it is in a run of so many steps; UserError where it says that it could do nothing."""
    law = config.law()
    if fit := getattr(law, "in_a_run_of", None):
        try:
            law = fit(math.ceil(steps / config.every), _validations_before_the_last(eval_steps, steps))
        except ValueError as error:
            raise UserError(f"--controller {config.controller}: {error}") from error
    return law


def with_bounds(request: Request, law: control.PI) -> Request:
    """The request with the bounds that lambda has: all that its YAML says counts as given when the run continues."""
    return request.with_values({f"control.{name}": getattr(law, name) for name in ("lambda_min", "lambda_max")})


def check_stops(run: RunConfig, every: int, steps: int, eval_steps: int) -> None:
    """Refuse what could never stop a run of so many optimizer steps, with a tick every so many.

    Raises:
        UserError: an equilibrium whose window is as long as the run or nearly; early stopping more patient than the
            run is long.
    """
    window, ticks = run.stop_at_equilibrium, math.ceil(steps / every)
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
