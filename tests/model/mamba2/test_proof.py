"""The self-check of compiled kernels: ours pass it in every precision, and each kind of fault is noticed and named."""

import re

import pytest
import torch
from transformers import LlamaConfig

from granite_scu.model.mamba2 import mamba
from granite_scu.model.mamba2.packages import CHUNK
from granite_scu.model.mamba2.proof import TORCH, Sizes, prove

CPU = torch.device("cpu")
WEIGHT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient that is ``factor`` times too large."""

    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def wrong_in_the_gradient_of(name):
    """A spoiler that leaves the output alone and takes a tenth off the gradient of one input."""

    def scan(**inputs):
        return TORCH.scan(**{**inputs, name: _Scaled.apply(inputs[name], 0.9)})

    return lambda output, **inputs: scan(**inputs).to(output.dtype)


def overflow(output, a, **inputs):
    return torch.where(a[:, None] < -5, torch.nan, output)


WRONG = {
    "output": (lambda output, **inputs: 1.1 * output, "the scan under weak decay: the output is off by 1.0e-01"),
    "a token late": (lambda output, **inputs: output.roll(1, 1), "the output is off by"),
    "shape": (lambda output, **inputs: output[:, :-1], "the output has shape .* instead of"),
    "NaN": (overflow, "the scan under strong decay: the output is off by nan"),
    **{
        f"gradient of {name}": (wrong_in_the_gradient_of(name), f"the gradient of {name} is off by 1.0e-01")
        for name in ("x", "dt", "a", "b", "c", "d")
    },
}


@pytest.mark.parametrize(("spoil", "words"), WRONG.values(), ids=WRONG)
def test_a_fault_of_the_scan_is_noticed_and_named(spoil, words):
    def scan(**inputs):
        return spoil(TORCH.scan(**inputs), **inputs)

    assert re.search(words, prove(mamba.Kernels("wrong", scan, TORCH.conv), CPU, torch.float32, Sizes()))


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_an_error_of_a_tenth_is_seen_in_every_precision(dtype):
    wrong = mamba.Kernels("wrong", lambda **inputs: 0.9 * TORCH.scan(**inputs), TORCH.conv)
    assert "the output is off by" in prove(wrong, CPU, dtype, Sizes())
    wrong = mamba.Kernels("wrong", TORCH.scan, lambda inputs, conv: 0.9 * TORCH.conv(inputs, conv))
    assert "the convolution: the output is off by" in prove(wrong, CPU, dtype, Sizes())


def test_a_kernel_that_is_right_only_within_a_chunk_is_refused():
    def forgetful(x, dt, a, b, c, d):
        parts = [slice(0, CHUNK), slice(CHUNK, None)]
        return torch.cat([TORCH.scan(x[:, p], dt[:, p], a, b[:, p], c[:, p], d) for p in parts], 1)

    wrong = mamba.Kernels("wrong", forgetful, TORCH.conv)
    assert "the scan under weak decay" in prove(wrong, CPU, torch.bfloat16, Sizes())


def test_kernels_that_let_documents_see_one_another_are_refused():
    wrong = mamba.Kernels("wrong", lambda seq_idx=None, **inputs: TORCH.scan(**inputs), TORCH.conv)
    assert "the scan of several documents" in prove(wrong, CPU, torch.bfloat16, Sizes())
    wrong = mamba.Kernels("wrong", TORCH.scan, lambda inputs, conv, seq_idx=None: TORCH.conv(inputs, conv))
    assert "the convolution of several documents" in prove(wrong, CPU, torch.bfloat16, Sizes())


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_ours_proves_right_in_every_precision(dtype):
    assert prove(TORCH, CPU, dtype, Sizes()) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_ours_in_the_form_that_is_compiled_prove_right_too(dtype):
    scan, conv = (torch.compile(function, backend="aot_eager") for function in (TORCH.scan, TORCH.conv))
    assert prove(mamba.Kernels("compiled", scan, conv), CPU, dtype, Sizes()) is None


def test_the_check_leaves_the_runs_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    prove(TORCH, CPU, torch.float32, Sizes())
    assert torch.equal(torch.rand(4), expected)


def test_the_sizes_of_a_configuration_are_those_of_its_layers(model):
    (layer, *_) = mamba.layers_of(model).values()
    assert Sizes.of_config(model.config) == Sizes.of(layer)
    assert Sizes.of_config(LlamaConfig()) is None
