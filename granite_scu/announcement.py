"""What the log of a run has before the first step: kernels, documents kept apart, the adapter at the start, S*."""

import logging
from typing import TYPE_CHECKING

import torch

from granite_scu import planning
from granite_scu.model import mamba
from granite_scu.model.documents import can_isolate
from granite_scu.module import GraniteModule
from granite_scu.steering import steers

if TYPE_CHECKING:
    from granite_scu.run import Run

log = logging.getLogger(__name__)


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
    if steers(run):
        most = planning.s_ceiling(run, [tuple(u.b.shape) for u in module.updates.values()])
        for warning in (
            planning.beyond_the_ceiling(run.controller.setpoint, most),
            planning.beyond_the_bounds(run.controller),
        ):
            if warning:
                log.warning(warning)


def announce_kernels(model: torch.nn.Module) -> None:
    """Say what the Mamba-2 layers run in, if there are any."""
    if kernels := mamba.kernels_in_use(model):
        log.info("Mamba-2 layers run in %s", kernels.name)
