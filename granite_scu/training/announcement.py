"""What the log of a run has before the first step: kernels, documents kept apart, the adapter at the start, S*."""

import logging
from typing import TYPE_CHECKING

from granite_scu.control.laws.replay import recorded_weight
from granite_scu.model.document_mask import can_isolate
from granite_scu.model.loading import announce_kernels
from granite_scu.training import preflight as planning
from granite_scu.training.module import GraniteModule

if TYPE_CHECKING:
    from granite_scu.training.recipe import Run

log = logging.getLogger(__name__)

SAME_WEIGHT = 1.1
"""Factor within which two runs' sigma^2 N count as one. The training text of another seed differs by less."""


def announce(run: "Run", module: GraniteModule) -> None:
    """Say it all. The model is loaded, and its adapters are in place."""
    announce_kernels(module.language_model)
    if run.request.data.isolate_documents and not can_isolate(module.language_model, run.machine.attention):
        log.warning(
            "%s has recurrent layers that carry their state from one document of a block into the next; "
            "--no-isolate-documents says that this is meant",
            run.request.base.name,
        )
    if run.start and (warning := run.start.mismatch(run.request.base.quantize_4bit)):
        log.warning(warning)
    if run.found:
        log.info("--target-s auto: S* = %.3g: %s", run.controller.setpoint, run.found["reason"])
    if warning := _other_weight(run):
        log.warning(warning)
    for warning in planning.out_of_reach(run, [tuple(u.b.shape) for u in module.updates.values()]):
        log.warning(warning)


def _other_weight(run: "Run") -> str | None:
    """A warning in one line, where the lambda that is replayed had another penalty to weigh."""
    path = run.request.control.replay
    if run.request.control.controller != "replay" or path is None or not (there := recorded_weight(path)):
        return None
    here = run.request.prior.sigma**2 * run.plan.n_tokens
    if 1 / SAME_WEIGHT < here / there < SAME_WEIGHT:
        return None
    return (
        f"--replay {path}: its run had sigma^2 N = {there:.3g} and this one has {here:.3g}, so the same lambda holds "
        f"the adapter {there / here:.3g} times as hard; --prior-sigma and --n-tokens set both"
    )
