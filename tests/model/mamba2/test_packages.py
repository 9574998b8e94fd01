"""The operators around compiled kernels, as autograd and the compiler see them: on tensors without contents."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from granite_scu.model.mamba2 import mamba, packages
from granite_scu.model.mamba2.proof import Sizes
from granite_scu.model.mamba2.tiling import describing

OPERATORS = {
    "fla-core": mamba.Kernels("fla-core", packages._fla_scan, packages._fla_convolve),
    "mamba-ssm": packages.kernels_of(packages.PACKAGES, "mamba-ssm"),
}
SIZES = Sizes(heads=48, head_dim=64, groups=1, state=128)


def inputs_of_a_layer(documents: bool):
    """(inputs, dt), and what has no gradient, of Granite-4.0-H-1B on two blocks of 1024 tokens in bf16."""
    bf16 = {"dtype": torch.bfloat16}
    conv = torch.nn.Conv1d(SIZES.conv_channels, SIZES.conv_channels, 4, groups=SIZES.conv_channels, **bf16)
    conv.requires_grad_(False)
    inputs = torch.empty(2, 1024, SIZES.conv_channels, **bf16).requires_grad_()
    dt = torch.empty(2, 1024, SIZES.heads).requires_grad_()
    seq_idx = torch.zeros(2, 1024, dtype=torch.long) if documents else None
    return (inputs, dt), (conv, torch.empty(SIZES.heads), torch.empty(SIZES.heads, **bf16), seq_idx)


def between_projections(kernels: mamba.Kernels, inputs, dt, conv, rates, skip, seq_idx):
    """Convolution and scan of a layer."""
    x, b, c = kernels.conv(inputs, conv, seq_idx=seq_idx).split([SIZES.inner, SIZES.state, SIZES.state], -1)
    grouped = (2, 1024, 1, SIZES.state)
    x = x.view(2, 1024, SIZES.heads, SIZES.head_dim)
    return kernels.scan(x, dt, rates, b.view(grouped), c.view(grouped), skip, seq_idx=seq_idx)


def kept(kernels: mamba.Kernels, documents: bool) -> int:
    """Bytes that are kept for the backward pass."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with FakeTensorMode(), describing("cuda"):
        trained, frozen = inputs_of_a_layer(documents)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            between_projections(kernels, *trained, *frozen)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_keeps_no_more_than_ours_do_by_which_memory_is_predicted(name, documents):
    step = 2 * 1024 * SIZES.heads * 4  # ours keep dt once; fla's twice, a hundredth of all
    assert kept(OPERATORS[name], documents) <= kept(mamba.TORCH, documents) + step


@pytest.mark.skipif(torch.__version__ < "2.11", reason="compiles nothing within a fake mode")
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_graph_goes_around_the_operators(name, recomputed, documents):
    """Forward and backward in one graph each, without contents and so without the packages."""
    torch.compiler.reset()
    work = partial(between_projections, OPERATORS[name])
    if recomputed:
        work = partial(checkpoint, work, use_reentrant=False)
    with FakeTensorMode():
        trained, frozen = inputs_of_a_layer(documents)
        output = torch.compile(work, backend="aot_eager", fullgraph=True)(*trained, *frozen)
        found = torch.autograd.grad(output, trained, torch.empty_like(output))
    assert [gradient.shape for gradient in found] == [tensor.shape for tensor in trained]
