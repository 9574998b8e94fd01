"""The replaced Mamba-2 forward against the library's own, on the embedded model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rounding import OF_EMBEDDED, assert_rounded, rounding
from torch.nn import functional as F
from transformers import FalconH1Config, FalconH1ForCausalLM, MambaConfig, MambaForCausalLM
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

from granite_scu.config.errors import UserError
from granite_scu.config.settings import BaseConfig
from granite_scu.model import loading
from granite_scu.model.mamba2 import mamba
from granite_scu.model.mamba2.conv import runs_of


@pytest.fixture
def tokens():
    return torch.randint(2, 4096, (2, 70), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def forbidden(monkeypatch):
    """Stands in for the fused kernel, which machines with mamba-ssm have and which passes the modules by."""

    def fused(*args, **kwargs):
        raise AssertionError("the fused kernel was called")

    monkeypatch.setattr(modeling, "mamba2_split_conv1d_scan_combined", fused)


def logits_of(model, tokens, **kwargs):
    return model(input_ids=tokens, use_cache=False, **kwargs).logits


def mamba_layers(model):
    return [module for module in model.modules() if mamba.is_mamba2(module)]


def test_every_mamba_layer_of_the_embedded_model_is_replaced(library_model):
    assert mamba.install(library_model) == library_model.config.layer_types.count("linear_attention") == 4


@pytest.mark.parametrize(("training", "fills_a_cache"), [(False, False), (True, False), (True, True)])
def test_the_logits_and_gradients_are_those_of_the_library(library_model, model, tokens, training, fills_a_cache):
    results = []
    for each in (library_model, model):
        each.train(training).requires_grad_(True)
        logits = each(input_ids=tokens, use_cache=fills_a_cache).logits
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        results.append((logits.detach(), {name: p.grad for name, p in each.named_parameters()}))
    (library_logits, library_gradients), (logits, gradients) = results
    assert (logits - library_logits).norm() < rounding(OF_EMBEDDED) * library_logits.norm()
    for name, gradient in library_gradients.items():
        assert (gradients[name] - gradient).norm() <= 2 * rounding(OF_EMBEDDED) * gradient.norm(), (
            name
        )  # there and back


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_masked_as_the_library_masks_it(library_model, model, tokens, side):
    mask = torch.ones_like(tokens)
    padded = slice(0, 11) if side == "left" else slice(-11, None)
    mask[0, padded] = 0
    expected, found = (logits_of(each, tokens, attention_mask=mask) for each in (library_model, model))
    assert (found - expected)[mask.bool()].norm() < rounding(OF_EMBEDDED) * expected[mask.bool()].norm()


def test_the_library_alone_would_call_the_fused_kernel(library_model, tokens, forbidden):
    with pytest.raises(AssertionError, match="the fused kernel was called"):
        logits_of(library_model.train(), tokens)


@pytest.mark.parametrize("length", [2, 66])  # shorter than the convolution, and longer than a chunk
def test_with_a_cache_each_token_has_the_librarys_logits_behind_padding_too(library_model, model, tokens, length):
    mask, found = torch.ones_like(tokens), []
    mask[0, : length - 1] = 0
    for each in (library_model, model):
        cache, at, logits = None, slice(0, length), []
        for end in range(length + 1, length + 5):
            with torch.no_grad():
                out = each.eval()(tokens[:, at], mask[:, : end - 1], past_key_values=cache, use_cache=True)
            logits.append(out.logits[:, -1])
            cache, at = out.past_key_values, slice(end - 1, end)
        found.append(torch.stack(logits))
    assert (found[1] - found[0]).norm() < rounding(OF_EMBEDDED) * found[0].norm()


@pytest.mark.parametrize("has_kernels", [False, True])
def test_generation_takes_the_librarys_forward_where_that_has_mamba_ssms_kernels(
    model, tokens, monkeypatch, has_kernels
):
    calls = []
    monkeypatch.setattr(modeling.GraniteMoeHybridMambaLayer, "forward", forward_told_of(calls))
    mamba.install(model, replace(mamba.TORCH, generates=has_kernels))
    model.eval().generate(tokens[:1, :9], max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert len(calls) == (2 * 4 if has_kernels else 0)


def forward_told_of(calls):
    """The library's own forward, with a call more in the list each time."""
    library = modeling.GraniteMoeHybridMambaLayer.forward

    def forward(layer, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        calls.append(layer)
        return library(layer, hidden_states, cache_params, attention_mask, **kwargs)

    return forward


@pytest.mark.parametrize("field", ["D", "norm", "time_step_limit", "num_heads"])
def test_a_layer_that_lacks_what_the_forward_needs_is_named(library_model, field):
    layer = library_model.model.layers[0].mamba
    delattr(layer, field)
    with pytest.raises(UserError, match=rf"model\.layers\.0\.mamba .* has no {field}; .* not supported"):
        mamba.install(library_model)


@pytest.mark.parametrize("field", ["A_log", "dt_bias", "in_proj", "ssm_state_size"])
def test_a_layer_of_a_hybrid_that_is_no_longer_known_is_not_left_to_the_library(library_model, field):
    delattr(library_model.model.layers[0].mamba, field)
    with pytest.raises(
        UserError, match=r"^transformers .*: 3 of 4 linear_attention layers .* pip install transformers=="
    ):
        mamba.install(library_model)


def test_a_library_that_changed_is_refused_before_anything_is_made_of_its_layers(small_granite, monkeypatch):
    init = modeling.GraniteMoeHybridMambaLayer.__init__

    def renamed(layer, *args, **kwargs):
        init(layer, *args, **kwargs)
        layer.groups = layer.__dict__.pop("n_groups")

    monkeypatch.setattr(modeling.GraniteMoeHybridMambaLayer, "__init__", renamed)
    with pytest.raises(UserError, match="has no n_groups; this version is not supported"):
        loading.load_model(BaseConfig(small_granite), torch.float32)


def test_the_version_named_is_the_one_that_is_tested():
    pinned = (Path(__file__).parents[3] / "constraints.txt").read_text()
    assert f"\ntransformers=={mamba.TESTED};" in pinned


def test_a_model_without_mamba_layers_is_left_alone():
    assert mamba.install(torch.nn.Sequential(torch.nn.Linear(2, 2))) == 0


def test_documents_of_a_block_are_mixed_as_if_each_stood_alone(model):
    layer = mamba_layers(model)[0]
    hidden = torch.randn(1, 30, layer.in_proj.in_features)
    documents = torch.repeat_interleave(torch.tensor([4, 9, 4]), torch.tensor([3, 16, 11]))[None]
    with torch.no_grad():
        together = layer(hidden, seq_idx=runs_of(documents))
        alone = torch.cat([layer(part) for part in hidden.split([3, 16, 11], 1)], 1)
    assert_rounded(together, alone, 192 + 16 + 64 + 384)


def test_another_activation_is_refused(library_model):
    library_model.model.layers[0].mamba.activation = "gelu"
    with pytest.raises(UserError, match=r"model\.layers\.0\.mamba has the activation gelu .* only silu"):
        mamba.install(library_model)


def test_mamba_1_and_falcons_mixer_which_scales_what_it_projects_keep_their_own_forward():
    config = FalconH1Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8,
    )  # fmt: skip
    assert mamba.install(FalconH1ForCausalLM(config)) == 0
    first = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=8)
    assert mamba.install(MambaForCausalLM(first)) == 0
