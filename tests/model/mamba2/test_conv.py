"""The causal convolution and its gradient against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from granite_scu.model.mamba2 import conv
from granite_scu.model.mamba2.conv import causal_conv_silu, runs_of


def inputs(time, width=4, batch=2, channels=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, time, channels), (channels, width), (channels,))
    return tuple(torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)


def reference(x, weight, bias):
    """torch's convolution of the padded sequence, one channel a group."""
    channels, width = weight.shape
    return F.silu(F.conv1d(F.pad(x.mT, (width - 1, 0)), weight.unsqueeze(1), bias, groups=channels)).mT


def assert_same(found, expected, tensors):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    both = [torch.autograd.grad((y * weight).sum(), tensors) for y in (found, expected)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("time", [1, 2, 3, 31, 32, 33, 35, 100])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_outputs_and_gradients_are_those_of_torch_at_any_length_and_width(time, width):
    tensors = inputs(time, width)
    assert_same(causal_conv_silu(*tensors), reference(*tensors), tensors)


def test_a_convolution_may_have_no_bias():
    x, weight, _ = inputs(20)
    assert_same(causal_conv_silu(x, weight, None), reference(x, weight, None), (x, weight))


def test_the_block_changes_nothing(monkeypatch):
    tensors, whole = inputs(50), []
    for size in (3, 1000):
        monkeypatch.setattr(conv, "BLOCK", size)
        y = causal_conv_silu(*tensors)
        whole.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
    for one, other in zip(*whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lengths", [[5, 30, 1, 1, 13], [2, 2, 2], [40, 40]])
def test_documents_of_a_block_are_convolved_as_if_each_stood_alone(lengths):
    x, weight, bias = inputs(sum(lengths), batch=1)
    documents = torch.repeat_interleave(torch.arange(len(lengths)) % 2, torch.tensor(lengths))[None]
    together = causal_conv_silu(x, weight, bias, runs_of(documents))
    alone = torch.cat([reference(part, weight, bias) for part in x.split(lengths, 1)], 1)
    assert_same(together, alone, (x, weight, bias))


def test_the_backward_pass_is_the_derivative_in_double_precision():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0]])
    tensors = inputs(7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *t: causal_conv_silu(*t, documents), tensors)


def test_bf16_is_rounded_once_and_not_at_each_tap():
    x, weight, bias = (t.bfloat16() for t in inputs(50))
    found = causal_conv_silu(x, weight, bias)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, causal_conv_silu(x.float(), weight.float(), bias.float()).bfloat16())


def test_the_backward_pass_keeps_the_inputs_only():
    tensors, kept = inputs(64), {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        causal_conv_silu(*tensors)
    assert sum(kept.values()) == sum(t.numel() for t in tensors)
