"""The chunked loss against the model's own logits and torch's cross-entropy."""

import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from references import OF_TYPE, granite, of_type
from rounding import OF_EMBEDDED, OF_GRANITE, assert_rounded, rounding
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from granite_scu.config.settings import IGNORED
from granite_scu.model import loss
from granite_scu.model.loss import summed_cross_entropy, summed_nats
from granite_scu.model.mamba2.tiling import describing, takes_onednn


@pytest.fixture(params=[0.3, 0.8], ids=["most", "few"])
def batch(request):
    """Tokens of three rows and labels of which that share does not count: of few, the logits alone are made."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 64, (3, 21), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < request.param] = IGNORED
    return tokens[:, :-1], labels


def plain_nats(model, input_ids, labels):
    """What the library's own logits say: cross-entropy over the positions that count, one by one."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return sum(
        F.cross_entropy(logits[row, t], labels[row, t])
        for row, t in (labels != IGNORED).nonzero().tolist()  # no ignore_index here: the count is made by hand
    )


def gradients(model, value):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(value, parameters, allow_unused=True)


WHOLE = ("gemma2", "cohere", "phi", "adapted head")
"""Whose logits are capped, multiplied, have a bias, and an adapter that the head's weight lacks."""

PLAIN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma3_text", "olmo", "gpt_oss")


@pytest.mark.parametrize("build", [*OF_TYPE, *PLAIN, *WHOLE, "embedded"])
def test_nats_and_gradient_are_those_of_the_models_own_logits(build, batch, request):
    if build == "embedded":
        model = request.getfixturevalue("model").requires_grad_(True)
    elif build == "adapted head":
        adapter = LoraConfig(target_modules=["lm_head"], init_lora_weights=False, r=2)
        model = get_peft_model(of_type("olmo"), adapter).get_base_model()
    else:
        model = granite(build) if build in OF_TYPE else of_type(build)
    with FakeTensorMode():  # as memory is planned
        assert loss.has_plain_head(model) == (build not in WHOLE)
    found, expected = summed_nats(model, *batch), plain_nats(model, *batch)
    assert found.dtype == torch.float32
    n = OF_EMBEDDED if build == "embedded" else OF_GRANITE
    assert_rounded(found, expected, n)
    for one, other in zip(gradients(model, found), gradients(model, expected), strict=True):
        assert (one - other).norm() <= 2 * rounding(n) * other.norm() + 1e-7  # there and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_compiled_chunk_gives_the_same_nats_and_gradient(monkeypatch, backend, dtype):
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_with(function, backend=backend))
    loss._compiled_work.cache_clear()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 20, 8, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(32, 8, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 32, (3, 20), generator=generator)
    labels[:, ::3] = IGNORED
    plain, fused = (summed_cross_entropy(hidden, head, labels, 6.0, 25, compiled) for compiled in (False, True))
    assert_rounded(fused, plain, 8 + 32 + 40)
    one, other = (torch.autograd.grad(nats, (hidden, head)) for nats in (plain, fused))
    torch.testing.assert_close(one, other)
    with torch.no_grad():
        assert_rounded(summed_cross_entropy(hidden, head, labels, 6.0, 25, True), plain, 8 + 32 + 40)
    loss._compiled_work.cache_clear()


@pytest.mark.parametrize("chunk", [1, 7, 60, 1000])
def test_the_chunk_changes_neither_the_nats_nor_the_gradient(chunk):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 20, 8, generator=generator, requires_grad=True)
    head = torch.randn(32, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, 32, (3, 20), generator=generator)
    labels[:, ::3] = IGNORED
    found = summed_cross_entropy(hidden, head, labels, scaling=2.0, chunk=chunk)
    expected = F.cross_entropy((hidden @ head.T / 2.0).flatten(0, 1), labels.flatten(), reduction="sum")
    n = 8 + 32 + 40  # the hidden state, the words, the positions
    assert_rounded(found, expected, n)
    for one, other in zip(
        torch.autograd.grad(found, (hidden, head)), torch.autograd.grad(expected, (hidden, head)), strict=True
    ):
        assert_rounded(one, other, n)


def test_the_logits_of_a_chunk_exist_at_once_and_no_more(monkeypatch):
    seen = []
    original = loss.logits_into
    monkeypatch.setattr(
        loss, "logits_into", lambda buffer, h, *rest: seen.append((len(buffer), len(h))) or original(buffer, h, *rest)
    )
    hidden = torch.randn(2, 25, 4, requires_grad=True)
    nats = summed_cross_entropy(hidden, torch.randn(8, 4), torch.zeros(2, 25, dtype=torch.long), 1.0, chunk=20)
    nats.backward()
    assert seen == [(20, 20), (20, 20), (20, 10)]  # and none again for the backward pass
    with describing("cuda"):  # where they are written in place, whoever made the processor
        assert not takes_onednn(hidden)


def test_what_is_kept_for_the_backward_pass_is_as_large_as_the_hidden_states():
    hidden, kept = torch.randn(2, 25, 4, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        summed_cross_entropy(hidden, torch.randn(8, 4), torch.zeros(2, 25, dtype=torch.long), 1.0)
    assert kept == [hidden.numel()]


def test_the_gradient_is_exact_in_double_precision():
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(*s, generator=generator).double().requires_grad_() for s in ((1, 7, 3), (5, 3)))
    labels = torch.tensor([[0, 4, IGNORED, 2, 2, IGNORED, 1]])
    assert torch.autograd.gradcheck(lambda h, w: 3 * summed_cross_entropy(h, w, labels, 1.7, chunk=3), (hidden, head))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_plain_loss_to_its_own_precision(dtype):
    """Against the library's way: products in half precision, the softmax in fp32."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 20, 16, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(5000, 16, generator=generator).to(dtype)
    labels = torch.randint(0, 5000, (3, 20), generator=generator)
    found = summed_cross_entropy(hidden, head, labels, scaling=6.0)
    expected = F.cross_entropy(((hidden @ head.T).float() / 6.0).flatten(0, 1), labels.flatten(), reduction="sum")
    assert_rounded(found, expected, 1, dtype)  # a logit between two numbers of the type may be rounded to the other
    exact = F.cross_entropy((hidden.float() @ head.float().T / 6.0).flatten(0, 1), labels.flatten(), reduction="sum")
    one, library, reference = (torch.autograd.grad(y, hidden)[0].float() for y in (found, expected, exact))
    assert (one - reference).norm() <= 1.5 * (library - reference).norm()


def test_what_an_unlikely_word_is_told_survives_fp16():
    """exp(-17), 4e-8, is below fp16's smallest number, 6e-8; times its hidden state, 1.4e-6, it is 24 of them."""
    hidden = torch.full((1, 1, 1), 34.0, dtype=torch.float16, requires_grad=True)
    head = torch.tensor([[0.0], [-0.5]], dtype=torch.float16, requires_grad=True)
    nats = summed_cross_entropy(hidden, head, torch.tensor([[0]]), 1.0)
    (found,) = torch.autograd.grad(nats, head)
    assert found[1].item() == pytest.approx(
        34 * math.exp(-17), rel=0.03
    )  # within half a unit: 1/48, and 1/355 on the way


class FactorsAsOnCuda(TorchDispatchMode):
    """A factor without dimensions is read in the other's dtype, as CUDA reads one that is on the device.

    aten/src/ATen/native/cuda/Loops.cuh, ``opmath_symmetric_gpu_kernel_with_scalars``: only one on the CPU is read as
    it is. The CPU reads each as it is.
    """

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.div, torch.ops.aten.mul_):
            dtype = torch.result_type(*args[:2])
            args = [t.to(dtype) if isinstance(t, torch.Tensor) and t.dim() == 0 else t for t in args]
        return operator(*args, **(kwargs or {}))


def test_the_factor_that_accumulation_puts_before_the_loss_is_not_rounded_to_bf16():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 8, generator=generator).bfloat16().requires_grad_()
    head, labels = torch.randn(16, 8, generator=generator).bfloat16(), torch.zeros(2, 9, dtype=torch.long)
    nats = summed_cross_entropy(hidden, head, labels, 1.0)
    (whole,) = torch.autograd.grad(nats, hidden, retain_graph=True)
    with FactorsAsOnCuda():
        (third,) = torch.autograd.grad(nats / 3, hidden)
    mean = float((3 * third.double() * whole.double()).sum() / whole.double().square().sum())
    assert abs(mean - 1) < 5e-4  # 1/3 in bf16 is 0.002 off


def test_a_label_that_is_no_word_is_refused_and_not_counted_as_the_first():
    with pytest.raises((RuntimeError, IndexError)):
        summed_cross_entropy(torch.randn(1, 2, 4), torch.randn(8, 4), torch.tensor([[0, -1]]), 1.0)


@pytest.mark.parametrize("build", ["gemma2", "phi", "embedded"])
def test_each_positions_nats_add_up_to_the_sum(build, batch, request):
    model = request.getfixturevalue("model") if build == "embedded" else of_type(build)
    each = loss.token_nats(model, *batch)
    assert each.shape == batch[1].shape
    assert not each[batch[1] == IGNORED].any()
    assert_rounded(each.sum(), summed_nats(model, *batch).detach(), OF_EMBEDDED)


def test_the_many_unlikely_words_of_a_large_vocabulary_are_not_lost():
    """Each is less than what fp32 adds to the sum of the likely ones, and all together are 2e-4 of it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 50_000, generator=generator)
    logits[..., 7] = 20

    class Fixed(torch.nn.Module):
        config = of_type("gemma2").config

        def forward(self, **inputs):
            return SimpleNamespace(logits=logits)

    labels = torch.full((2, 3), 7)
    exact = F.cross_entropy(logits.double().mT, labels, reduction="none")
    found = loss.token_nats(Fixed(), torch.zeros(2, 3, dtype=torch.long), labels)
    # That label leaves ``exact`` nats to all others. Of eight lanes or more the likely word spoils one.
    assert ((found - exact).abs() < exact / 4).all()


def test_where_few_positions_count_the_head_reads_no_others(batch):
    model, rows = of_type("gemma2"), []
    model.lm_head.register_forward_hook(lambda head, inputs, logits: rows.append(logits.shape[:-1].numel()))
    summed_nats(model, *batch)
    loss.token_nats(model, *batch)
    counted, labels = int((batch[1] != IGNORED).sum()), batch[1].numel()
    assert rows == [counted if counted < labels / 2 else labels] * 2
    assert not model.lm_head._forward_pre_hooks
