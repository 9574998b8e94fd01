from collections.abc import Callable

import peft
import pytest
import torch
from functorch.compile import make_boxed_func
from peft.tuners.lora import LoraLayer
from rounding import OF_EMBEDDED, rounding
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL, BaseConfig, LoraConfig
from granite_scu.model import adapters, loading
from granite_scu.model.adapters import attach, leave_casting_to_autocast, linear_layers, low_rank_updates, untrained
from granite_scu.model.description_length import squared_norms

PROJECTIONS = {
    "mamba": ["in_proj", "out_proj"],
    "self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "shared_mlp": ["input_linear", "output_linear"],
}


def names_of(model) -> set[str]:
    """What has to be adapted in a Granite hybrid, from its configuration and not from its modules."""
    names = set()
    for i, kind in enumerate(model.config.layer_types):
        mixer = "mamba" if kind == "linear_attention" else "self_attn"
        for part in (mixer, "shared_mlp"):
            names |= {f"model.layers.{i}.{part}.{projection}" for projection in PROJECTIONS[part]}
    return names


def backward(model):
    tokens = torch.randint(2, 4096, (1, 20), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()


def randomise(updates):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for u in updates.values():
            u.b.copy_(torch.randn(u.b.shape, generator=generator))


def test_every_linear_layer_but_the_head_gets_an_adapter(model):
    expected = names_of(model)
    assert len(expected) == 28
    assert set(linear_layers(model)) == expected
    assert set(low_rank_updates(attach(model, LoraConfig()))) == expected


def test_where_peft_refuses_a_layer_the_others_get_an_adapter(caplog):
    small = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=8))
    with pytest.raises(
        UserError, match=r"^--lora-targets out_proj: no linear layer that can .*layers in_proj, x_proj$"
    ):
        attach(small, LoraConfig(targets=["out_proj"]))
    adapted = {name.rpartition(".")[2] for name in low_rank_updates(attach(small, LoraConfig()))}
    assert adapted == {"in_proj", "x_proj"} and "no adapter on dt_proj, out_proj, which PEFT" in caplog.text


def test_a_layer_whose_last_name_a_container_has_too_gets_an_adapter():
    """In a sequence it is called 0, and the first decoder layer too."""
    small = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=8))
    small.backbone.layers[0].mixer.x_proj = nn.Sequential(small.backbone.layers[0].mixer.x_proj)
    assert "backbone.layers.0.mixer.x_proj.0" in low_rank_updates(attach(small, LoraConfig()))


def test_experts_get_no_adapter_in_the_place_of_dense_layers_that_have_their_old_names(caplog):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    mixture = AutoModelForCausalLM.from_config(AutoConfig.for_model("afmoe", **sizes, num_dense_layers=1))
    adapted = {name.rpartition(".")[2] for name in low_rank_updates(attach(mixture, LoraConfig()))}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "no adapter on down_proj, gate_proj, up_proj, which PEFT" in caplog.text


@pytest.mark.parametrize(
    ("kind", "more", "left_out"),
    [
        ("phimoe", {}, "router"),
        ("llama4_text", {"intermediate_size_mlp": 48, "head_dim": 8, "interleave_moe_layer_step": 1}, "router"),
        ("afmoe", {"moe_intermediate_size": 16, "head_dim": 8, "num_dense_layers": 1}, "gate"),
        (
            "deepseek_v4",
            {"head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8}
            | {"n_routed_experts": 4, "moe_intermediate_size": 16},
            "o_a_proj",
        ),
    ],
)
def test_what_returns_no_plain_product_gets_no_adapter(kind, more, left_out):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    mixture = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | more))
    names = {name.rpartition(".")[2] for name in linear_layers(mixture)}
    assert left_out not in names and names & {"k_proj", "kv_proj"}
    ids = torch.arange(16)[None]
    attach(mixture, LoraConfig()).train()(input_ids=ids, labels=ids).loss.backward()


def test_every_adapter_of_a_model_whose_layers_pass_some_of_their_matrices_by_is_trained():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 8, "num_hidden_layers": 4, "num_mem_blocks": 1}
    sizes |= {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    small = AutoModelForCausalLM.from_config(AutoConfig.for_model("zamba2", **sizes))
    adapted, ids = attach(small, LoraConfig()).train(), torch.arange(16)[None]
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert not untrained(low_rank_updates(adapted))


def test_only_the_adapters_are_trained_and_they_start_at_no_change(model):
    adapted = attach(model, LoraConfig(rank=4, alpha=6.0))
    updates = low_rank_updates(adapted)
    trained = {id(p) for p in adapted.parameters() if p.requires_grad}
    assert trained == {id(factor) for u in updates.values() for factor in (u.a, u.b)}
    assert not squared_norms(list(updates.values())).any()
    assert all(u.a.any() and u.a.shape[0] == u.b.shape[1] == 4 and u.scale == 1.5 for u in updates.values())


def test_rank_stabilised_the_scale_has_the_root_of_the_rank(model):
    config = LoraConfig(rank=4, alpha=6.0, rslora=True, targets=["q_proj"])
    updates = low_rank_updates(attach(model, config))
    assert {u.scale for u in updates.values()} == {3.0} == {config.scale}
    assert LoraConfig(rank=4, alpha=6.0).scale == 1.5


@pytest.mark.parametrize(
    ("kind", "part"), [("attention", ".self_attn."), ("mamba", ".mamba."), ("mlp", ".shared_mlp.")]
)
def test_a_kind_of_layers_stands_for_all_of_it(model, kind, part):
    updates = low_rank_updates(attach(model, LoraConfig(targets=kind)))
    assert set(updates) == {name for name in names_of(model) if part in name} != set()


@pytest.mark.parametrize(("target", "hint"), [("out_prj", "did you mean out_proj"), ("lm_head", "layers in_proj")])
def test_a_target_that_no_layer_has_is_refused_with_those_there_are(model, target, hint):
    with pytest.raises(UserError, match=f"--lora-targets {target}: .*{hint}") as refused:
        attach(model, LoraConfig(targets=["q_proj", target]))
    available = sorted(name for names in PROJECTIONS.values() for name in names)
    assert ", ".join(sorted(available)) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_factors_make_the_update_that_peft_merges(model):
    adapted = attach(model, LoraConfig(rank=3, alpha=7.0))
    updates = low_rank_updates(adapted)
    randomise(updates)
    layers = dict(adapted.get_base_model().named_modules())
    for name, u in updates.items():
        delta = layers[name].get_delta_weight("default")
        torch.testing.assert_close(u.scale * u.b @ u.a, delta)
        torch.testing.assert_close(squared_norms([u])[0], delta.square().sum(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", ["plain", "dropout", "4 bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_inside_of_the_product_is_pefts_own(dtype, case):
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        base = loading.load_model(BaseConfig(TINY_MODEL, quantize_4bit=case == "4 bits"), dtype)
        adapted = attach(base, LoraConfig(rank=4, alpha=10.0, dropout=0.2 if case == "dropout" else 0.0)).train()
        updates = low_rank_updates(adapted)
        with torch.no_grad():
            for u in updates.values():
                u.b.copy_(0.01 * torch.randn(u.b.shape))
        layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
        assert all(layer.lora_variant for layer in layers)
        for layer in layers if not ours else ():
            layer.lora_variant.clear()
        torch.manual_seed(1)  # the dropout's
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
            backward(adapted)
        results.append([factor.grad for u in updates.values() for factor in (u.a, u.b)])
    allowed = 2 * rounding(OF_EMBEDDED) if dtype == torch.float32 else 0.1  # bf16 rounds a scaled sum at another place
    for one, other in zip(*results, strict=True):
        assert one.dtype == torch.float32 and (one - other).norm() <= allowed * other.norm()


class Products:
    """A backend of torch.compile that counts the matrix products of both passes."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.backend = aot_autograd(fw_compiler=self.count, bw_compiler=self.count)

    def count(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.found.append(sum(node.target in products for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize(
    ("size", "dropout", "products"),
    [
        ((8, 64), 0.0, [2, 5]),  # forward joined: the narrow product and the sum
        ((64, 8), 0.0, [3, 4]),  # backward joined: a wide product less
        ((64, 64), 0.0, [3, 5]),
        ((8, 64), 0.5, [3, 5]),  # the base layer has other inputs
    ],
)
def test_compiled_an_adapter_joins_its_layers_product_where_that_moves_less(size, dropout, products):
    config = peft.LoraConfig(r=2, lora_alpha=3, lora_dropout=dropout, target_modules=["0"], init_lora_weights=False)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(*size, bias=False))
    layers = adapters._with_our_products(peft.get_peft_model(plain, config, adapters.ADAPTER)).double()
    inputs = torch.randn(4, 32, size[0], dtype=torch.double, requires_grad=True)
    trained = [inputs, *(parameter for parameter in layers.parameters() if parameter.requires_grad)]
    counted, found = Products(), []
    for model in (layers, torch.compile(layers, backend=counted.backend)):
        torch.manual_seed(1)  # of dropout
        outputs = model(inputs)
        found.append([outputs, *torch.autograd.grad((outputs * outputs.detach().cos()).sum(), trained)])
    torch.testing.assert_close(*found)
    assert counted.found == products


def test_no_adapter_of_the_embedded_model_is_bypassed(model):
    adapted = attach(model, LoraConfig(rank=2)).train()
    updates = low_rank_updates(adapted)
    assert untrained(updates) == list(updates)  # no backward pass yet
    backward(adapted)
    assert untrained(updates) == []


@pytest.mark.parametrize("leave", [False, True])
def test_casting_left_to_autocast_changes_no_number_and_widens_no_input(library_model, leave):
    adapted = attach(library_model.bfloat16(), LoraConfig(rank=2))
    for module in adapted.modules():
        if isinstance(module, adapters._Linear):  # which widens nothing, and is a CPU's alone
            module.__class__ = peft.tuners.lora.Linear
    randomise(low_rank_updates(adapted))
    tokens, seen = torch.arange(2, 22)[None], []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = adapted(input_ids=tokens, use_cache=False).logits
        if leave:
            leave_casting_to_autocast(adapted)
        for name, module in adapted.named_modules():
            if name.endswith("lora_dropout.default"):
                module.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        found = adapted(input_ids=tokens, use_cache=False).logits
    assert torch.equal(found, expected)
    assert (torch.float32 in seen) == (not leave)
