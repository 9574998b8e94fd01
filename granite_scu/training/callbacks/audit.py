"""The start-up audit: every adapter receives a gradient, or the run stops and names those that do not."""

import lightning as L
import torch

from granite_scu.config.errors import RunFailed
from granite_scu.model.adapters import untrained
from granite_scu.training.module import GraniteModule


class AdapterAudit(L.Callback):
    """Looks once, after the first accumulation window whose gradients are finite, before the penalty is added.

    Callback hooks run before the module's, so what is seen here is the gradient of the data alone.
    """

    def __init__(self) -> None:
        self.passed = False

    def on_before_optimizer_step(self, trainer: L.Trainer, module: GraniteModule, optimizer) -> None:
        if self.passed or not module.learned:  # of a window without a token to learn no gradient says anything
            return
        gradients = [u.b.grad for u in module.updates.values()]
        complete = all(gradient is not None for gradient in gradients)
        if complete and not bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients))):
            return  # this step will be skipped; look at the next
        missing = untrained(module.updates)
        if missing:
            raise RunFailed(
                f"{len(missing)} of {len(module.updates)} adapters receive no gradient: {', '.join(missing)}; "
                "something bypasses these layers, so they would stay untrained: leave them out with --lora-targets"
            )
        self.passed = True
