"""Training in fp16 with loss scaling: real fp16 products and a real GradScaler, both on the CPU.

Lightning keeps fp16 for GPUs, so the plugin that it would build there is handed to it.
"""

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from rounding import rounding
from test_module import Endless, description_gradient, error, mean_gradient, minus, norm, same, set_factors

from granite_scu.training.module import GraniteModule

USUAL = 2.0**16
"""The scale that PyTorch starts with."""


@pytest.fixture
def fit_fp16(fit):
    """As ``fit``, in fp16 with a loss scaler that starts at ``scale``."""

    def run(module, batches, scale=USUAL, scaling=None, **settings) -> L.Trainer:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, **(scaling or {}))
        return fit(module, batches, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **settings)

    return run


class Watched(GraniteModule):
    """Keeps the gradient that the newest optimizer step was given."""

    def prepare_gradient(self, optimizer) -> None:
        super().prepare_gradient(optimizer)
        self.given = [p.grad if p.grad is None else p.grad.clone() for p in self.factors]


@pytest.fixture
def make_fp16(make_module):
    """As ``make_module``, the frozen weights in fp16."""
    return lambda **arguments: make_module(Watched, dtype=torch.float16, **arguments)


@pytest.fixture
def trained(make_module, fit, make_batches) -> list[torch.Tensor]:
    """Factors that training has reached, where B is not zero."""
    module = make_module(optimizer={"learning_rate": 0.01})
    fit(module, make_batches(4))
    return [factor.detach().clone() for factor in module.factors]


@pytest.mark.parametrize("scale", [2.0**6, USUAL])
def test_lambda_adds_exactly_its_gradient_whatever_the_scale(
    make_module, make_fp16, fit_fp16, make_batches, trained, scale
):
    lam, prior, given = 3.0, {"sigma": 0.002, "n_tokens": 1}, {}
    for each in (0.0, lam):
        module = make_fp16(**prior)
        set_factors(module, trained)
        module.lam = each
        fit_fp16(module, make_batches(2), scale, accumulate_grad_batches=2)
        given[each] = module.given
    exact = make_module(**prior)
    set_factors(exact, trained)
    assert error(given[0.0], mean_gradient(exact, make_batches(2))) < 0.01  # of fp16's rounding
    penalty = [lam * gradient for gradient in description_gradient(exact)]
    assert norm(penalty) > norm(given[0.0])  # so that fp32 can tell the difference
    assert error(minus(given[lam], given[0.0]), penalty) < rounding(2 * (32 + 4))  # as in test_module


def test_clipping_acts_on_the_unscaled_sum(make_fp16, fit_fp16, make_batches, trained):
    module = make_fp16(optimizer={"gradient_clip": 0.25}, sigma=0.002, n_tokens=1)
    set_factors(module, trained)
    module.lam = 3.0
    fit_fp16(module, make_batches(1))
    assert norm(module.given) == pytest.approx(0.25, rel=1e-4)


def test_a_resumed_run_goes_on_at_the_scale_it_had(make_fp16, fit_fp16, make_batches, tmp_path):
    batches, growing = make_batches(5), {"growth_interval": 2}
    whole, half, resumed = make_fp16(), make_fp16(), make_fp16()
    scaler = fit_fp16(whole, Endless(batches), 2.0**8, growing, max_steps=5).precision_plugin.scaler
    fit_fp16(half, Endless(batches), 2.0**8, growing, max_steps=3).save_checkpoint(tmp_path / "state.ckpt")
    trainer = fit_fp16(resumed, Endless(batches[3:]), 2.0**8, growing, max_steps=5, ckpt_path=tmp_path / "state.ckpt")
    assert scaler.get_scale() == 2.0**10  # grown twice, once before the checkpoint
    assert trainer.precision_plugin.scaler.state_dict() == scaler.state_dict()
    assert same(resumed.factors, whole.factors)
