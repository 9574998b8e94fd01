"""Which kernels the Mamba-2 layers get. The compiled ones are stood in for: those that a GPU has are checked there."""

import importlib.metadata
import inspect
import logging
import sys
from types import ModuleType

import pytest
import torch
from references import recurrence
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL, BaseConfig, LoraConfig
from granite_scu.model import adapters, loading
from granite_scu.model.loss import hidden_states
from granite_scu.model.mamba2 import kernels, mamba
from granite_scu.model.mamba2.kernels import TORCH, Sizes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WEIGHT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class MambaSSM:
    """A stand-in for mamba-ssm 2.3 and causal-conv1d 1.6: the arguments that ours have there, the definition behind
    them."""

    name = "mamba-ssm 2.3.2's Triton kernels and causal-conv1d 1.6.1"

    def __init__(self, spoil=lambda output, **inputs: output, sees_across=False):
        self.distributions = {"mamba-ssm": "2.3.2", "causal-conv1d": "1.6.1"}
        self.spoil, self.sees_across, self.scans, self.convolutions = spoil, sees_across, 0, 0

    def modules(self):
        return {
            "mamba_ssm.ops.triton.ssd_combined": {
                "mamba_chunk_scan_combined": self.mamba_chunk_scan_combined,
                "mamba_split_conv1d_scan_combined": fused,
            },
            "causal_conv1d": {"causal_conv1d_fn": self.causal_conv1d_fn},
        }

    def mamba_chunk_scan_combined(self, x, dt, A, B, C, chunk_size, D=None, seq_idx=None):
        self.scans += 1
        wide = (x.float(), dt, A, B.float(), C.float(), D.float())
        out = recurrence(*wide, self.first_tokens(seq_idx, x.shape[:2])).to(x.dtype)
        return self.spoil(out, x=x, dt=dt, a=A, b=B, c=C, d=D)

    def first_tokens(self, seq_idx, shape):
        """What both packages ask of the numbers of documents, whose first tokens these are."""
        if seq_idx is None or self.sees_across:
            return None
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == shape and seq_idx.is_contiguous()
        assert (seq_idx.diff(dim=1) >= 0).all(), "a number that comes back is taken for the same document"
        return F.pad(seq_idx.diff(dim=1) != 0, (1, 0), value=True)

    def causal_conv1d_fn(self, x, weight, bias=None, seq_idx=None, activation=None):
        self.convolutions += 1
        assert seq_idx is None or x.stride(1) == 1, "only where channels are last in memory"
        return convolve(x, weight, bias, activation, self.first_tokens(seq_idx, (len(x), x.shape[2])))


class FlaCore:
    """A stand-in for fla-core 0.6: the arguments that ours have there, the definition behind them."""

    name = "fla-core 0.6.0's Triton kernels"

    def __init__(self):
        self.distributions = {"fla-core": "0.6.0"}
        self.scans = self.convolutions = 0

    def modules(self):
        return {
            "fla.ops.simple_gla": {"chunk_simple_gla": self.chunk_simple_gla},
            "fla.modules.causal_conv1d": {"causal_conv1d": self.causal_conv1d},
        }

    def chunk_simple_gla(self, q, k, v, g=None, scale=None, cu_seqlens=None):
        assert q.shape == k.shape and v.shape[:3] == g.shape == q.shape[:3], "equally many heads"
        assert q.dtype == k.dtype == v.dtype and g.dtype == torch.float32
        self.scans += 1
        first = self.first_tokens(cu_seqlens, q.shape[:2])
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        state, outputs = v.new_zeros(*q.shape[::2], v.shape[3], q.shape[3], dtype=torch.float32), []
        for t in range(q.shape[1]):
            added = v[:, t, :, :, None].float() * k[:, t, :, None, :].float()
            state = state if first is None else state.masked_fill(first[:, t, None, None, None], 0)
            state = g[:, t, :, None, None].exp() * state + added
            outputs.append(scale * (state * q[:, t, :, None, :].float()).sum(-1))
        return torch.stack(outputs, 1).to(q.dtype), None

    def first_tokens(self, cu_seqlens, shape):
        """What the package asks of documents, whose first tokens these are."""
        if cu_seqlens is None:
            return None
        assert shape[0] == 1, "documents of several rows must stand in one"
        assert cu_seqlens.dtype == torch.long and cu_seqlens[0] == 0 and cu_seqlens[-1] == shape[1]
        assert (cu_seqlens.diff() > 0).all()
        return torch.zeros(shape, dtype=torch.bool).index_fill(1, cu_seqlens[:-1], True)

    def causal_conv1d(self, x, weight=None, bias=None, activation=None, cu_seqlens=None):
        self.convolutions += 1
        first = self.first_tokens(cu_seqlens, x.shape[:2])
        return convolve(x.transpose(1, 2), weight, bias, activation, first).transpose(1, 2), None


def convolve(x, weight, bias, activation, first=None):
    """(batch, channels, time) in and out, with the activation that both libraries know under this name."""
    assert activation == "silu"
    inputs = F.pad(x.float(), (weight.shape[1] - 1, 0)).unfold(2, weight.shape[1], 1)  # (..., time, width)
    if first is not None:
        documents = first.cumsum(1)
        seen = F.pad(documents, (weight.shape[1] - 1, 0)).unfold(1, weight.shape[1], 1) == documents.unsqueeze(2)
        inputs = inputs * seen.unsqueeze(1)
    out = (inputs * weight.float()[:, None]).sum(-1) + bias.float()[:, None]
    return F.silu(out).to(x.dtype)


def fused(*args, **kwargs):
    raise AssertionError("the fused kernel was called")


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


def crash(output, **inputs):
    raise RuntimeError("PassManager::run failed\nat line 3")


WRONG = {
    "output": (lambda output, **inputs: 1.1 * output, "the scan under weak decay: the output is off by 1.0e-01"),
    "a token late": (lambda output, **inputs: output.roll(1, 1), "the output is off by"),
    "shape": (lambda output, **inputs: output[:, :-1], r"the output has shape .* instead of"),
    "NaN": (overflow, "the scan under strong decay: the output is off by nan"),
    "raises": (crash, r"RuntimeError: PassManager::run failed\)"),
    **{
        f"gradient of {name}": (wrong_in_the_gradient_of(name), f"the gradient of {name} is off by 1.0e-01")
        for name in ("x", "dt", "a", "b", "c", "d")
    },
}


@pytest.fixture
def install(monkeypatch):
    """Installs stand-ins for compiled packages, and none besides."""
    versions: dict[str, str] = {}

    def version(distribution):
        if distribution not in versions:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)
    kernels.choose.cache_clear()

    def install(*packages):
        for package in packages:
            versions.update(package.distributions)
            for path, functions in package.modules().items():
                parts = path.split(".")
                for depth in range(1, len(parts)):
                    monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
                module = ModuleType(path)
                vars(module).update(functions)
                monkeypatch.setitem(sys.modules, path, module)

    yield install
    kernels.choose.cache_clear()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A GPU is asked for and the CPU computes, so that the choice is made as there."""
    prove = kernels.prove
    monkeypatch.setattr(kernels, "prove", lambda found, device, dtype, sizes: prove(found, CPU, dtype, sizes))


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("granite_scu"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def choose(request, device=GPU, dtype=torch.float32):
    return kernels.choose(request, device, dtype, Sizes())


# Which


def test_on_the_cpu_the_layers_run_in_pytorch(install):
    install(MambaSSM(), FlaCore())
    assert choose("auto", CPU) is choose("torch", CPU) is choose("torch", GPU) is TORCH


def test_without_packages_the_layers_run_in_pytorch(install, warnings_of):
    assert choose("auto") is TORCH
    assert warnings_of() == []


@pytest.mark.parametrize(("request_", "dtype"), zip(["auto", "cuda", "auto"], WEIGHT_DTYPES, strict=True))
@pytest.mark.parametrize("kind", [MambaSSM, FlaCore])
def test_right_kernels_are_taken_and_used(install, on_a_gpu, warnings_of, kind, dtype, request_):
    package = kind()
    install(package)
    found = choose(request_, dtype=dtype)
    assert found.name == kind.name
    assert warnings_of() == []
    before = package.scans, package.convolutions
    model = loading.load_model(BaseConfig(TINY_MODEL, kernels="torch"), torch.float32)
    tokens, several = torch.arange(2, 24).view(2, 11), torch.tensor([[0] * 11, [4, 4, 9, 9, 9, 9, 9, 4, 4, 4, 4]])
    with torch.no_grad():
        expected = [hidden_states(model, tokens, documents) for documents in (None, several)]
        assert mamba.install(model, found) == 4
        assert mamba.kernels_in_use(model) is found
        states = [hidden_states(model, tokens, documents) for documents in (None, several)]
    assert (package.scans - before[0], package.convolutions - before[1]) == (8, 8)
    for one, other in zip(states, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_mamba_ssm_comes_first(install, on_a_gpu):
    install(FlaCore(), MambaSSM())
    assert choose("auto").name == MambaSSM.name


def test_mamba_ssm_without_causal_conv1d_runs_our_convolution(install, on_a_gpu):
    package = MambaSSM()
    del package.distributions["causal-conv1d"]
    install(package)
    found = choose("auto")
    assert (found.name, found.conv) == ("mamba-ssm 2.3.2's Triton kernels", TORCH.conv)


# What is refused


@pytest.mark.parametrize(("spoil", "words"), WRONG.values(), ids=WRONG)
def test_wrong_kernels_are_refused(install, on_a_gpu, warnings_of, spoil, words):
    install(MambaSSM(spoil))
    assert choose("auto") is choose("auto") is TORCH, "a second model is not warned of"
    (warning,) = warnings_of()
    assert warning.startswith("mamba-ssm 2.3.2 failed its self-check (")
    assert warning.endswith("; the Mamba-2 layers run in PyTorch")
    with pytest.raises(UserError, match=rf"^--kernels cuda: mamba-ssm 2.3.2 failed .*{words}.*use --kernels auto"):
        choose("cuda")
    assert len(warnings_of()) == 1


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_an_error_of_a_tenth_is_seen_in_every_precision(dtype):
    wrong = mamba.Kernels("wrong", lambda **inputs: 0.9 * TORCH.scan(**inputs), TORCH.conv)
    assert "the output is off by" in kernels.prove(wrong, CPU, dtype, Sizes())
    wrong = mamba.Kernels("wrong", TORCH.scan, lambda inputs, conv: 0.9 * TORCH.conv(inputs, conv))
    assert "the convolution: the output is off by" in kernels.prove(wrong, CPU, dtype, Sizes())


def test_a_kernel_that_is_right_only_within_a_chunk_is_refused():
    def forgetful(x, dt, a, b, c, d):
        parts = [slice(0, kernels.MAMBA_CHUNK), slice(kernels.MAMBA_CHUNK, None)]
        return torch.cat([TORCH.scan(x[:, p], dt[:, p], a, b[:, p], c[:, p], d) for p in parts], 1)

    wrong = mamba.Kernels("wrong", forgetful, TORCH.conv)
    assert "the scan under weak decay" in kernels.prove(wrong, CPU, torch.bfloat16, Sizes())


def test_kernels_that_let_documents_see_one_another_are_refused(install, on_a_gpu, warnings_of):
    install(MambaSSM(sees_across=True))
    assert choose("auto") is TORCH
    (warning,) = warnings_of()
    assert "failed its self-check (the convolution of several documents: the output is off by" in warning
    wrong = mamba.Kernels("wrong", lambda seq_idx=None, **inputs: TORCH.scan(**inputs), TORCH.conv)
    assert "the scan of several documents" in kernels.prove(wrong, CPU, torch.bfloat16, Sizes())


def test_after_a_wrong_one_the_next_is_tried(install, on_a_gpu, warnings_of):
    install(MambaSSM(crash), FlaCore())
    assert choose("auto").name == choose("cuda").name == FlaCore.name
    assert all(warning.endswith(f"the Mamba-2 layers run in {FlaCore.name}") for warning in warnings_of())


def test_several_wrong_ones_cost_one_warning(install, on_a_gpu, warnings_of):
    install(MambaSSM(crash), broken := FlaCore())
    broken.chunk_simple_gla = crash
    install(broken)
    assert choose("auto") is TORCH
    (warning,) = warnings_of()
    assert "mamba-ssm 2.3.2 failed" in warning and "; fla-core 0.6.0 failed" in warning


def test_a_package_that_cannot_be_imported_is_refused(install, on_a_gpu, warnings_of, monkeypatch):
    install(FlaCore())
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", None)  # what a failed import leaves
    assert choose("auto") is TORCH
    (warning,) = warnings_of()
    assert "fla-core 0.6.0 failed its self-check (ModuleNotFoundError" in warning


def test_insisting_where_there_is_nothing_to_try_is_refused(install):
    with pytest.raises(UserError, match=r"--kernels cuda: .*pip install 'granite-scu\[kernels\]'"):
        choose("cuda")
    install(FlaCore())
    with pytest.raises(UserError, match=r"--kernels cuda: the run is on the CPU.*use --kernels auto"):
        choose("cuda", CPU)


# What must not change with it


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_ours_proves_right_in_every_precision(dtype):
    assert kernels.prove(TORCH, CPU, dtype, Sizes()) is None


def test_the_check_leaves_the_runs_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    kernels.prove(TORCH, CPU, torch.float32, Sizes())
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("kind", [None, MambaSSM, FlaCore])
def test_every_adapter_of_a_layer_is_trained_whatever_computes_it(install, on_a_gpu, monkeypatch, library_model, kind):
    monkeypatch.setattr(modeling, "mamba2_split_conv1d_scan_combined", fused)
    tokens = torch.randint(2, 4096, (2, 20), generator=torch.Generator().manual_seed(0))
    install(*([kind()] if kind else []))
    gradients = []
    for found in (TORCH, choose("auto")):
        mamba.install(library_model, found)
        torch.manual_seed(0)
        adapted = adapters.attach(library_model, LoraConfig(rank=2, targets=["in_proj", "out_proj"])).train()
        logits = adapted(input_ids=tokens, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        updates = adapters.low_rank_updates(adapted)
        assert len(updates) == 8
        assert adapters.untrained(updates) == []
        gradients.append([update.b.grad for update in updates.values()])
        library_model = adapted.unload()
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() < 1e-4 * one.norm()


def test_the_sizes_of_a_configuration_are_those_of_its_layers(model):
    (layer, *_) = mamba.layers_of(model).values()
    assert Sizes.of_config(model.config) == Sizes.of(layer)
    assert Sizes.of_config(LlamaConfig()) is None


def test_a_loaded_model_says_what_it_runs_in(model):
    assert mamba.kernels_in_use(model) is TORCH
    assert mamba.kernels_in_use(torch.nn.Linear(2, 2)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES[1:])
@pytest.mark.parametrize("name", kernels.CANDIDATES)
def test_what_is_installed_proves_right(name, dtype):
    if name not in kernels.installed():
        pytest.skip(f"{name} is not installed")
    sizes = Sizes(heads=48, head_dim=64, groups=1, state=128)
    assert kernels.prove(kernels.CANDIDATES[name](), GPU, dtype, sizes) is None


@pytest.mark.parametrize("argument", mamba._ARGUMENTS)
def test_a_library_whose_layer_takes_other_arguments_is_refused(library_model, monkeypatch, argument):
    layer = type(library_model.model.layers[0].mamba)
    others = [name for name in inspect.signature(layer.forward).parameters if name != argument]
    forward = eval(f"lambda {', '.join(others).replace('kwargs', '**kwargs')}: None")
    monkeypatch.setattr(layer, "forward", forward)
    with pytest.raises(UserError, match=rf"mamba .* has no argument {argument}; .* not supported"):
        mamba.install(library_model)
