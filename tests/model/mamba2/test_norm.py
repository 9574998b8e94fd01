"""The norms and their gradients against the library's modules."""

from importlib import import_module

import pytest
import torch
from rounding import rounding
from torch import nn
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

from granite_scu.model.mamba2.norm import PLAIN, gated_norm, groups_of, install, is_gated_norm


def norm_of(channels=12, groups=1):
    norm = GraniteMoeHybridRMSNormGated(channels, channels // groups, eps=1e-3)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    return norm


def inputs(dtype=torch.float32, time=50):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, time, 12, generator=generator).to(dtype).requires_grad_() for _ in range(2))


@pytest.mark.parametrize("groups", [1, 3])
def test_outputs_and_gradients_are_those_of_the_library(groups):
    norm, (hidden, gate) = norm_of(groups=groups), inputs()
    found = gated_norm(hidden, gate, norm.weight, norm.variance_epsilon, groups_of(norm), torch.float32)
    expected = norm(hidden, gate)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    tensors = (hidden, gate, norm.weight)
    both = [torch.autograd.grad((y * weight).sum(), tensors) for y in (found, expected)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_backward_pass_is_the_derivative_in_double_precision():
    hidden, gate = inputs(torch.float64, time=3)
    weight = torch.randn(12, dtype=torch.float64, requires_grad=True)

    def norm(hidden, gate, weight):
        return gated_norm(hidden, gate, weight, 1e-3, 3, torch.float64)

    assert torch.autograd.gradcheck(norm, (hidden, gate, weight))


def test_the_result_comes_in_the_dtype_asked_for_and_the_gradient_in_that_of_the_gate():
    norm, (hidden, gate) = norm_of(), inputs()
    gate = gate.detach().bfloat16().requires_grad_()
    found = gated_norm(hidden, gate, norm.weight, norm.variance_epsilon, 1, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), norm(hidden, gate), rtol=rounding(1.01, torch.bfloat16), atol=0)
    assert torch.autograd.grad(found.float().sum(), gate)[0].dtype == torch.bfloat16


def test_the_library_s_norm_is_known_and_others_are_not_taken_for_it():
    class GateAfterNorm(GraniteMoeHybridRMSNormGated):
        def forward(self, hidden_states, gate=None):
            return super().forward(hidden_states) * nn.functional.silu(gate)

    assert is_gated_norm(norm_of())
    assert is_gated_norm(norm_of(groups=3))
    assert not is_gated_norm(GateAfterNorm(12, 12))
    assert not is_gated_norm(nn.LayerNorm(12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_norm_is_the_librarys(name, dtype):
    family = name.removesuffix("RMSNorm").lower()
    norm = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(12)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    hidden, weight = inputs()
    hidden, norm = hidden.detach().to(dtype).requires_grad_(), norm.to(dtype)

    def results():
        found = norm(hidden)
        return found, *torch.autograd.grad((found * weight.detach().to(dtype)).sum(), (hidden, norm.weight))

    expected = results()
    install(nn.Sequential(norm))
    assert "forward" in vars(norm)
    for one, other in zip(results(), expected, strict=True):
        # A handful of roundings to the dtype, of numbers as large as the largest.
        torch.testing.assert_close(one, other, rtol=0, atol=4 * rounding(1.01, dtype) * float(other.abs().max()))
