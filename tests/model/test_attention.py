"""Documents that share a block are computed as if each stood alone, on a CPU by products of our own."""

import pytest
import torch
from references import granite
from rounding import OF_GRANITE, assert_rounded
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from granite_scu.config.settings import IGNORED, BaseConfig
from granite_scu.model import loading
from granite_scu.model.attention import CPU_ATTENTION, attend, can_isolate, choose_isolation, isolating
from granite_scu.model.loss import summed_nats, token_nats
from granite_scu.model.mamba2 import mamba
from granite_scu.model.mamba2.tiling import describing

LENGTHS = [[9, 1, 22, 8], [40], [3, 37]]


def dense(kind: str = "granite") -> torch.nn.Module:
    """A Granite with rotary positions and no Mamba layer."""
    return granite(kind, num_hidden_layers=4, initializer_range=0.3)


KINDS = [
    *("hybrid sdpa cuda", "hybrid eager cpu", "granite sdpa cpu", "granite eager cpu"),
    *("granite_swa eager cpu", "granitemoe_swa eager cpu"),
    *(f"{kind} {CPU_ATTENTION} cpu" for kind in ("hybrid", "granite", "granitemoe")),
]


@pytest.fixture(params=KINDS)
def model(request, small_granite):
    kind, attention, device = request.param.split()
    if device != "cpu":
        request.getfixturevalue("as_on_cuda")
    found = loading.load_model(BaseConfig(small_granite), torch.float32) if kind == "hybrid" else dense(kind)
    found.set_attn_implementation(attention)
    return found.requires_grad_(True).train()


@pytest.fixture
def as_on_cuda():
    with describing("cuda"):
        yield


@pytest.fixture
def block():
    """Inputs, labels and document numbers of three rows; a document's last position predicts nothing."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(2, 60, (3, 40), generator=generator)
    labels = torch.randint(2, 60, (3, 40), generator=generator)
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS])
    for row, lengths in enumerate(LENGTHS):
        labels[row, torch.tensor(lengths).cumsum(0) - 1] = IGNORED
    return inputs, labels, documents


def alone(inputs, labels):
    """Each document in a batch of its own."""
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            yield inputs[row : row + 1, part], labels[row : row + 1, part], (row, part)
            start += length


def test_each_document_of_a_block_has_the_loss_that_it_has_alone(model, block):
    inputs, labels, documents = block
    together = token_nats(model, inputs, labels, documents)
    for ids, targets, (row, part) in alone(inputs, labels):
        assert_rounded(together[row, part], token_nats(model, ids, targets)[0], OF_GRANITE)
    assert not torch.allclose(together, token_nats(model, inputs, labels), atol=1e-3), "seen as a whole it differs"


def test_gradients_are_the_sum_of_those_alone(model, block):
    inputs, labels, documents = block
    parameters = [p for name, p in model.named_parameters() if "norm" not in name][:12]
    together = torch.autograd.grad(summed_nats(model, inputs, labels, documents), parameters)
    nats = sum(summed_nats(model, ids, targets) for ids, targets, _ in alone(inputs, labels))
    for found, expected in zip(together, torch.autograd.grad(nats, parameters), strict=True):
        assert_rounded(found, expected, 2 * OF_GRANITE + 3 * 40)  # there, back, and over the tokens


def test_a_gpus_mask_is_made_once_in_the_dtype_that_its_kernels_add_it_in(small_granite, as_on_cuda):
    model = loading.load_model(BaseConfig(small_granite), torch.bfloat16)
    mask = isolating(model, torch.tensor([[0, 0, 1]]))["attention_mask"]["full_attention"]
    least = torch.finfo(torch.bfloat16).min
    assert mask.dtype == torch.bfloat16  # booleans would be turned into this in every layer
    assert mask.tolist() == [[[[0, least, least], [0, 0, least], [least, least, 0]]]]


def test_a_block_that_is_seen_as_a_whole_takes_no_arguments(model):
    assert isolating(model, None) == {}


OTHERS = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "xglm": {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 5},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
                   "layers_block_type": ["mamba", "attention"]},
    "bloom": {"n_head": 4, "n_layer": 2},
    "jamba": {"mamba_d_state": 4, "num_experts": 2, "attn_layer_offset": 0, "attn_layer_period": 2},
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_keep_documents_apart_where_trying_finds_a_way(kind, block):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | OTHERS[kind])).eval()
    mamba.install(model)
    choose_isolation(model)
    inputs, labels, documents = block
    assert can_isolate(model) == (kind not in ("bloom", "jamba"))
    if not can_isolate(model):
        assert isolating(model, documents) == {}  # nor do positions begin anew
        return
    together = token_nats(model, inputs, labels, documents)
    for ids, targets, (row, part) in alone(inputs, labels):
        assert_rounded(together[row, part], token_nats(model, ids, targets)[0], OF_GRANITE)


# On a CPU


def of_lengths(*lengths: int) -> torch.Tensor:
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (numbers[:, None] == numbers[None, :]).tril()


CASES = {
    "causal, computed again": (130, 8, None),
    "causal, kept": (70, 64, None),
    "documents across chunks": (150, 16, torch.stack([of_lengths(3, 90, 57), of_lengths(150)])),
    "short documents": (200, 64, of_lengths(*[20] * 10).expand(2, -1, -1)),
    "a window": (150, 8, torch.ones(2, 150, 150, dtype=torch.bool).tril().triu(-20)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_sdpa(case):
    length, size, seen = case
    torch.manual_seed(0)
    shapes = (2, 6, length, size), (2, 2, length, size), (2, 2, length, size + 4)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = None if seen is None else seen[:, None]
    found, _ = attend(torch.nn.Module(), *tensors, mask, scaling=0.3)
    q, k, v = tensors
    expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=0.3, enable_gqa=True)
    expected = expected.transpose(1, 2)
    weights = torch.randn_like(expected)
    for ours, theirs in zip(
        (found, *torch.autograd.grad((found * weights).sum(), tensors)),
        (expected, *torch.autograd.grad((expected * weights).sum(), tensors)),
        strict=True,
    ):
        # Sums of at most 150 terms in fp64: 150 * 2 ** -53 of their size.
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_a_dense_model_on_a_cpu_has_it(tmp_path):
    granite("granite").save_pretrained(tmp_path)
    model = loading.load_model(BaseConfig(str(tmp_path)), torch.float32)
    assert model.config._attn_implementation == CPU_ATTENTION
