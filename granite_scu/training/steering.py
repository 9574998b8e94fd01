"""The law of a run: refused early where no text and no length can change it, and settled when both are known."""

from granite_scu import control
from granite_scu.config.request import Request
from granite_scu.config.settings import check_drift
from granite_scu.training.controller import (
    build_controller,
    check_equilibrium_stop,
    check_length,
    check_slopes,
    drift_law,
)
from granite_scu.training.prepared_run import intervals_of


def first_law(request: Request, controller: control.Controller | None) -> control.Controller:
    """The law as the request alone has it; ``controller`` steers in place of the one that it describes.

    Raises:
        UserError: there is none such, or nothing would settle under it where the run is to stop at equilibrium.
    """
    law = controller or build_controller(request.control)
    if request.run.stop_at_equilibrium:
        check_equilibrium_stop(request.control)
    return law


def settle_law(request: Request, controller: control.Controller | None, steps: int) -> control.Controller:
    """The law of a run of so many optimizer steps, which holds drift where a budget is given.

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
    if law.needs_slopes:
        check_slopes(every, steps)
    return law
