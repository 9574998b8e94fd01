"""The real Triton kernels of fla-core and mamba-ssm, interpreted, against ours; run by ``test_real_kernels``."""

import json
import os
from functools import partial

import interpreting  # noqa: F401  before any kernel is defined
import pytest
import torch

from benchmarks.no_extensions import without_cuda_extensions
from granite_scu.config.settings import TINY_MODEL, BaseConfig, LoraConfig
from granite_scu.model import adapters, loading
from granite_scu.model.loss import summed_nats
from granite_scu.model.mamba2 import mamba, packages, proof

CPU, SIZES = torch.device("cpu"), proof.Sizes(heads=2, head_dim=16, groups=1, state=16)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


HUBS = "from mamba_ssm.ops.triton import ssd_combined\nglobals().update(vars(ssd_combined))\n"
"""In the place of the hub's own copy of mamba-ssm's Python code."""


def as_on_the_hub(folder):
    """A repository of the hub on disk, as ``kernels`` reads one where LOCAL_KERNELS names it."""
    build = folder / "build" / "torch-universal"
    (build / "ops" / "triton").mkdir(parents=True)
    for place in (build, build / "ops", build / "ops" / "triton"):
        (place / "__init__.py").touch()
    (build / "ops" / "triton" / "ssd_combined.py").write_text(HUBS)
    (build / "__init__.py").write_text("from .ops.triton import ssd_combined\n")
    about = {"id": "mamba_ssm_hub", "name": "mamba-ssm", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (build / "metadata.json").write_text(json.dumps(about | {"backend": {"type": "cpu"}}))
    os.environ["LOCAL_KERNELS"] = f"kernels-community/mamba-ssm={folder}"


@pytest.fixture(scope="module", params=["fla-core", "mamba-ssm", "hub"])
def package(request, tmp_path_factory):
    if request.param == "fla-core":
        return packages.fla_core()
    without_cuda_extensions()
    if request.param == "mamba-ssm":
        return packages.mamba_ssm()
    pytest.importorskip("kernels", reason="needs the package kernels, which make test-slow installs")
    as_on_the_hub(tmp_path_factory.mktemp("hub"))
    packages._scans(packages.HUB)
    # causal-conv1d is written in CUDA: nothing of it runs here.
    return mamba.Kernels("the hub's", partial(packages._mamba_scan, packages.HUB), mamba.activated_conv)


@pytest.mark.parametrize("precision", DTYPES)
def test_outputs_and_every_gradient_are_ours(package, precision):
    """Weak and strong decay, one document and several: the check that a run makes on its GPU."""
    assert proof.prove(package, CPU, DTYPES[precision], SIZES) is None


def test_groups_of_heads_share_their_projections(package):
    assert proof.prove(package, CPU, torch.float32, proof.Sizes(heads=4, head_dim=16, groups=2, state=16)) is None


def test_a_wrong_call_is_noticed(package):
    """As if its gates were other ones, or it saw past a document's start."""
    wrong = mamba.Kernels("", lambda x, dt, a, *rest, **more: package.scan(x, dt, a * 0.9, *rest, **more), package.conv)
    assert "is off by" in proof.prove(wrong, CPU, torch.float32, SIZES)
    blind = mamba.Kernels("", lambda *parts, seq_idx=None, **more: package.scan(*parts, **more), package.conv)
    assert "several documents" in proof.prove(blind, CPU, torch.float32, SIZES)


def test_a_step_of_the_embedded_model_trains_every_adapter_as_ours_does(package):
    ids = torch.randint(0, 200, (1, 70), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(70) > 40).long()[None]
    found = []
    for kernels in (mamba.TORCH, package):
        model = loading.load_model(BaseConfig(TINY_MODEL), torch.float32)
        mamba.install(model, kernels)
        torch.manual_seed(0)
        adapted = adapters.attach(model, LoraConfig(rank=2)).train()
        nats = summed_nats(adapted.get_base_model(), ids, ids, documents)
        nats.backward()
        updates = adapters.low_rank_updates(adapted)
        assert adapters.untrained(updates) == []
        found.append([nats.detach(), *(update.b.grad for update in updates.values())])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-4 * one.norm()


@pytest.mark.parametrize("name", ["gated_linear_attention", "fla_conv_silu", "mamba2_scan"])
def test_an_operator_keeps_what_it_promises_the_compiler(name):
    """torch.library's own check: schema, autograd registration, and fakes against what is really returned."""
    if name == "mamba2_scan":
        without_cuda_extensions()
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw).requires_grad_()  # noqa: E731
    documents = (torch.arange(70) > 40).int().expand(2, -1).contiguous()
    decays = -torch.rand(2, 70, 2, generator=draw)
    inputs = {
        "gated_linear_attention": (normal(2, 70, 1, 16), normal(2, 70, 1, 16), normal(2, 70, 2, 16), decays, documents),
        "fla_conv_silu": (normal(2, 70, 64), torch.randn(64, 4, generator=draw), torch.zeros(64), documents),
        "mamba2_scan": (
            normal(2, 70, 2, 16), -decays, torch.tensor([-1.0, -2.0]), normal(2, 70, 1, 16), normal(2, 70, 1, 16),
            torch.ones(2), documents, packages.PACKAGES,
        ),
    }  # fmt: skip
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(packages, name), inputs[name], test_utils=tests)
