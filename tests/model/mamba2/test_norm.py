"""The norms and gates, and their gradients, against the library's modules."""

from importlib import import_module

import pytest
import torch
from rounding import rounding
from torch import nn
from transformers import AutoConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

from granite_scu.model.mamba2.norm import GATED, PLAIN, gated_norm, groups_of, install, is_gated_norm


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
@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_a_plain_norm_or_gated_mlp_is_the_librarys(name, dtype):
    family = name.removesuffix("RMSNorm").removesuffix("MLP").lower()
    kind = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    torch.manual_seed(2)
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1}
    module = (kind(12) if name in PLAIN else kind(AutoConfig.for_model(family, **sizes))).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    hidden, weight = (tensor.detach().to(dtype) for tensor in inputs())  # more rows than are gated at once
    tensors = hidden.requires_grad_(), *module.parameters()

    def results():
        found = module(hidden)
        return found, *torch.autograd.grad((found * weight).sum(), tensors)

    expected = results()
    install(nn.Sequential(module))
    assert "forward" in vars(module)
    for one, other in zip(results(), expected, strict=True):
        # Sums of 12, 20, 12 and 100 terms follow one another: as chance has it, the root of 144 roundings.
        assert (one - other).norm() <= rounding(12, dtype) * other.norm()
