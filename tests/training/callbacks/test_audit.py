"""The start-up audit, in real runs."""

import lightning as L
import pytest
import torch

from granite_scu.config.errors import RunFailed
from granite_scu.config.settings import IGNORED
from granite_scu.training.callbacks.audit import AdapterAudit

BYPASSED = "model.layers.0.mamba.out_proj"


def bypass(module, name: str = BYPASSED) -> None:
    """Let a layer compute without its adapter, as a fused kernel that reads its weight does."""
    layer = module.language_model.get_submodule(name)
    layer.forward = layer.base_layer.forward


class Steps(L.Callback):
    """How many optimizer steps were begun."""

    def __init__(self):
        self.begun = 0

    def on_before_optimizer_step(self, *_):
        self.begun += 1


@pytest.mark.parametrize("names", [[BYPASSED], ["model.layers.0.mamba.in_proj", "model.layers.1.self_attn.v_proj"]])
def test_a_bypassed_adapter_stops_the_run_at_its_first_step_and_is_named(make_module, make_batches, fit, names):
    module, steps = make_module(), Steps()
    for name in names:
        bypass(module, name)
    words = f"^{len(names)} of {len(module.updates)} adapters receive no gradient: {', '.join(names)}; .*--lora-targets"
    with pytest.raises(RunFailed, match=words):
        fit(module, make_batches(3), callbacks=[steps, AdapterAudit()])
    assert steps.begun == 1


def test_the_penalty_does_not_hide_a_bypassed_adapter(make_module, make_batches, fit):
    """Where B is not zero, as in a resumed run, the penalty has a gradient for every adapter."""
    module = make_module()
    with torch.no_grad():
        for update in module.updates.values():
            update.b.fill_(0.1)
    module.lam = 1.0
    bypass(module)
    with pytest.raises(RunFailed, match=BYPASSED):
        fit(module, make_batches(1), callbacks=[AdapterAudit()])


@pytest.mark.parametrize("teaches", [True, False])
def test_it_waits_for_a_window_that_is_finite_and_teaches_something(make_module, make_batches, fit, poison, teaches):
    module, audit = make_module(), AdapterAudit()
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *_):
            seen.append(audit.passed)

    first, *rest = make_batches(3)
    first = poison(module, first) if teaches else first | {"labels": torch.full_like(first["labels"], IGNORED)}
    fit(module, [first, *rest], callbacks=[audit, Watch()])
    assert seen == [False, True, True]


def test_after_a_window_that_is_not_finite_an_adapter_without_gradient_is_still_found(
    make_module, make_batches, fit, poison
):
    module, steps = make_module(), Steps()
    module.updates[BYPASSED].b.register_hook(torch.zeros_like)
    first, *rest = make_batches(3)
    with pytest.raises(RunFailed, match=BYPASSED):
        fit(module, [poison(module, first), *rest], callbacks=[steps, AdapterAudit()])
    assert steps.begun == 2


def test_a_window_that_is_not_finite_does_not_hide_a_bypassed_adapter(make_module, make_batches, fit, poison):
    module = make_module()
    bypass(module)
    with pytest.raises(RunFailed, match=f"^1 of .*: {BYPASSED};"):
        fit(module, [poison(module, batch) for batch in make_batches(3)], callbacks=[AdapterAudit()])


def test_it_looks_once(make_module, make_batches, fit):
    class Mute(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 1:  # a gradient of zeros, which a healthy adapter too may have later
                module.updates[BYPASSED].b.register_hook(torch.zeros_like)

    fit(make_module(), make_batches(3), callbacks=[AdapterAudit(), Mute()])
