"""Adapters on the experts of a mixture: our forward pass against PEFT's own, and the measure against Delta W itself."""

import json
import types
from dataclasses import replace

import peft
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from rounding import OF_SMALL, assert_rounded, rounding
from safetensors import safe_open
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from granite_scu.config.errors import UserError
from granite_scu.config.settings import BaseConfig, LoraConfig
from granite_scu.model import adapters, experts, flops, loading, saved_adapter
from granite_scu.model.adapter_files import check_adapter
from granite_scu.model.adapters import attach, low_rank_updates, untrained
from granite_scu.model.description_length import by_expert, layer_npt, penalty_gradient, squared_norms
from granite_scu.storage.checkpoint import save_adapter

TOKENS = torch.randint(2, 60, (2, 15), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def adapted(small_mixture):
    """The small mixture with adapters everywhere, whose B is not zero."""
    return attached(small_mixture)


def attached(folder, dtype=torch.float32, rank=3, size=0.3, **more):
    model = loading.load_model(BaseConfig(folder), dtype)
    torch.manual_seed(0)
    model = attach(model, LoraConfig(rank=rank, alpha=5.0, experts=True, **more)).train()
    with torch.no_grad():
        for update in low_rank_updates(model).values():
            update.b.copy_(size * torch.randn(update.b.shape))
    return model


def loss_of(model):
    logits = model(input_ids=TOKENS, use_cache=False).logits.float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def as_peft_does_it(model):
    """The same model, its experts in PEFT's own forward pass."""
    for _, wrapper in experts.wrappers(model):
        wrapper.forward = types.MethodType(ParamWrapper.forward, wrapper)
    return model


def stacked(updates):
    return {name: update for name, update in updates.items() if update.experts}


def test_every_stack_of_experts_gets_an_adapter_under_its_own_name(adapted):
    names = {f"model.layers.{i}.block_sparse_moe.experts.{p}" for i in (0, 1) for p in ("gate_up_proj", "down_proj")}
    found = stacked(low_rank_updates(adapted))
    assert (
        set(found) == names == set(experts.stacks(loading.load_model(BaseConfig(adapted.name_or_path), torch.float32)))
    )
    assert {(u.experts, *u.a.shape, *u.b.shape) for u in found.values()} == {(6, 18, 24, 32, 18), (6, 18, 16, 24, 18)}
    assert all(u.a.dtype == u.b.dtype == torch.float32 for u in found.values())


def test_logits_and_gradients_are_those_of_pefts_forward_pass(small_mixture):
    found = []
    for change in (lambda model: model, as_peft_does_it):
        model = change(attached(small_mixture))
        updates = low_rank_updates(model)
        loss = loss_of(model)
        loss.backward()
        found.append([loss.detach(), *(f.grad for u in updates.values() for f in (u.a, u.b))])
    for ours, theirs in zip(*found, strict=True):
        assert_rounded(ours, theirs, 2 * OF_SMALL)  # there and back


@pytest.mark.parametrize(("change", "copies"), [(lambda model: model, 0), (as_peft_does_it, 4)], ids=["ours", "PEFT's"])
def test_no_stack_is_kept_a_second_time_for_the_backward_pass(adapted, change, copies):
    own, kept = {p.untyped_storage().data_ptr() for p in adapted.parameters()}, set()

    def note(tensor):
        storage = tensor.untyped_storage()
        if tensor.ndim == 3 and tensor.shape[0] == 6 and storage.nbytes() >= 4 * 6 * 16 * 24:
            kept.add(storage.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(change(adapted))
    assert len(kept - own) == copies


def test_experts_that_no_token_reaches_have_a_gradient_of_zeros(adapted):
    layer = adapted.get_base_model().model.layers[0].block_sparse_moe.experts
    chosen = torch.tensor([[1, 4], [4, 1], [4, 0]])
    layer(torch.randn(3, 24, requires_grad=True), chosen, torch.full((3, 2), 0.5)).square().sum().backward()
    updates = {n: u for n, u in stacked(low_rank_updates(adapted)).items() if ".0." in n}
    assert len(updates) == 2 and untrained(updates) == []
    for update in updates.values():
        for gradient in by_expert(update.a.grad, update.b.grad, 6):
            assert gradient.flatten(1).any(1).tolist() == [True, True, False, False, True, False]
            assert torch.isfinite(gradient).all()


def test_switched_off_the_model_is_the_base(adapted, small_mixture):
    base = loading.load_model(BaseConfig(small_mixture), torch.float32)
    expected = base(input_ids=TOKENS, use_cache=False).logits
    with adapted.disable_adapter():
        assert torch.equal(adapted(input_ids=TOKENS, use_cache=False).logits, expected)
    assert not torch.allclose(adapted(input_ids=TOKENS, use_cache=False).logits, expected)


def test_the_norms_are_those_of_the_updates_that_peft_would_merge(adapted):
    updates = low_rank_updates(adapted)
    deltas = {
        experts.name_of(name, wrapper).removeprefix("base_model.model."): wrapper.get_delta_weight("default")
        for name, wrapper in experts.wrappers(adapted)
    }
    for name, update in stacked(updates).items():
        torch.testing.assert_close(
            squared_norms([update])[0], deltas[name].square().sum(), rtol=rounding(24 * 32), atol=0
        )


@pytest.mark.parametrize("measure", ["delta", "factors"])
@pytest.mark.parametrize("from_one", [False, True], ids=["new", "from an adapter"])
def test_the_closed_form_is_autograds(adapted, measure, from_one):
    updates = list(low_rank_updates(adapted).values())
    if from_one:
        updates = [replace(u, origin=(0.9 * u.a.detach(), 0.5 * u.b.detach() + 0.1)) for u in updates]
    factors = [f for u in updates for f in (u.a, u.b)]
    expected = torch.autograd.grad(layer_npt(updates, 0.02, 1000, measure).sum(), factors)
    found = [g for pair in penalty_gradient(updates, 0.02, 1000, measure) for g in pair]
    for one, other, factor in zip(found, expected, factors, strict=True):
        assert one.shape == factor.shape
        assert_rounded(one, other, 2 * (32 + 18))  # sums over a side of Delta W and over the rank


def test_plain_peft_loads_what_was_saved_and_computes_the_same(adapted, small_mixture, tmp_path):
    save_adapter(adapted, tmp_path, small_mixture)
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_mixture), tmp_path)
    expected = adapted.eval()(input_ids=TOKENS, use_cache=False).logits
    assert_rounded(plain(input_ids=TOKENS, use_cache=False).logits, expected, OF_SMALL)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert set(adapters.names_in_file(adapted)) == set(file.keys())
    weights, config = (
        (tmp_path / "adapter_model.safetensors").read_bytes(),
        json.loads((tmp_path / "adapter_config.json").read_text()),
    )
    assert check_adapter(weights, config)["layers"] == 14
    with pytest.raises(ValueError, match=r"experts.* says rank 4, so .n 4, in. and .out, n 4. of n experts"):
        check_adapter(weights, config | {"r": 4, "rank_pattern": dict.fromkeys(config["target_modules"], 3)})
    with pytest.raises(ValueError, match=r"experts.* is not a factor of a layer that"):
        check_adapter(weights, config | {"target_parameters": None})
    ours = saved_adapter.find(tmp_path)
    updates = low_rank_updates(adapted)
    assert {name: (u.scale, u.experts) for name, u in ours.updates(small_mixture).items()} == {
        name: (u.scale, u.experts) for name, u in updates.items()
    }


def test_a_model_without_experts_is_refused_before_its_weights_are_read(small_granite):
    with pytest.raises(UserError, match="--lora-experts: this granitemoehybrid model has no experts") as refused:
        flops.measure(small_granite, LoraConfig(experts=True), 16)
    assert "\n" not in str(refused.value)


def test_dropout_is_refused_with_experts():
    with pytest.raises(UserError, match=r"--lora-dropout 0\.1: adapters of experts have no dropout"):
        LoraConfig(experts=True, dropout=0.1)


def test_a_token_counts_the_adapters_of_its_own_experts_alone(small_mixture):
    without, with_experts = (flops.measure(small_mixture, LoraConfig(rank=4, experts=e), 16) for e in (False, True))
    of_experts = 2 * 6 * 4 * (24 + 32 + 16 + 24)  # two layers of six experts
    assert with_experts.trained - without.trained == of_experts
    assert with_experts.flops_per_token - without.flops_per_token == 6 * of_experts / 3  # two of six
    assert len(with_experts.adapted) - len(without.adapted) == 2 * 6 * 2
