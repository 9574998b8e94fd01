"""Operations of a training step: against PyTorch's own counter, and against the numbers of the papers."""

import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL, LoraConfig
from granite_scu.model import adapters, flops, loading

BLOCK = 64


def counted(model) -> dict:
    """Operations that PyTorch counts in a forward and backward pass over a block, by operator."""
    ids = torch.zeros(1, BLOCK, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    return counter.get_flop_counts()["Global"]


@pytest.fixture(scope="module")
def dense_config():
    from transformers import GraniteConfig

    return GraniteConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip


def test_a_dense_model_takes_what_pytorch_counts(dense_config, tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "_is_plain", lambda layer: False)  # PyTorch counts no addmm_ and none of oneDNN's
    dense_config.save_pretrained(tmp_path)
    lora = LoraConfig(rank=4)
    expected = flops.measure(str(tmp_path), lora, BLOCK)
    torch.manual_seed(0)
    model = adapters.attach(AutoModelForCausalLM.from_config(dense_config, attn_implementation="eager"), lora)
    products = {str(name): count for name, count in counted(model).items()}
    found = sum(products.values()) / BLOCK
    # Eager attention multiplies the masked half too, and the first layer's input wants no gradient.
    attention = flops.mixing_products(dense_config, BLOCK)
    first_inputs = 2 * 64 * (64 + 32 + 32) + 2 * 64 * 3 * 4
    assert found == pytest.approx(expected.flops_per_token + 6 * attention - first_inputs, rel=0.01)


def test_frozen_weights_cost_four_and_adapters_six(dense_config, tmp_path):
    dense_config.save_pretrained(tmp_path)
    small, large = (flops.measure(str(tmp_path), LoraConfig(rank=rank), BLOCK) for rank in (4, 8))
    assert large.flops_per_token - small.flops_per_token == 6 * (large.trained - small.trained)
    assert small.trained == 4 * sum(out + into for out, into, _ in small.adapted)
    some = flops.measure(str(tmp_path), LoraConfig(rank=4, targets=["q_proj"]), BLOCK)
    assert len(some.adapted) == 2 and some.frozen == small.frozen


def test_the_embedded_hybrid():
    size = flops.measure(TINY_MODEL, LoraConfig(), BLOCK)
    config = loading.load_model_config(TINY_MODEL)
    scan = 2 * config.mamba_n_heads * config.mamba_d_head * config.mamba_d_state
    attention = config.num_attention_heads * (config.hidden_size // config.num_attention_heads) * BLOCK
    assert flops.mixing_products(config, BLOCK) == 4 * scan + 2 * attention
    # Everything but norms, decays and biases is in a product, the tied embedding as the head.
    assert 4 * 0.99 * size.frozen < size.flops_per_token - 6 * size.trained < 4 * 1.1 * size.frozen


def test_a_model_without_attention_has_none_to_count():
    from transformers import MambaConfig

    assert flops.mixing_products(MambaConfig(num_hidden_layers=2), BLOCK) == 0


def test_of_experts_those_count_that_a_token_is_sent_to():
    from transformers import GraniteMoeConfig, Qwen2MoeConfig

    def weights(chosen: int, kind=GraniteMoeConfig, **settings) -> int:
        config = kind(
            vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_experts_per_tok=chosen, **settings,
        )  # fmt: skip
        with torch.device("meta"):
            return flops.weights_in_products(AutoModelForCausalLM.from_config(config))

    expert = 32 * 96 + 48 * 32  # gate and up together, and down
    named = {"num_local_experts": 8}, {"num_experts": 8, "kind": Qwen2MoeConfig, "moe_intermediate_size": 48}
    for settings in named:
        assert weights(4, **settings) - weights(2, **settings) == 2 * expert


def test_a_count_is_kept_for_as_long_as_the_weights_are_the_same(small_granite, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, file = tmp_path / "copy", tmp_path / "cache" / "granite-scu" / "sizes.json"
    shutil.copytree(small_granite, folder)
    counted = flops.measure(str(folder), LoraConfig(rank=4), 16)
    written = file.stat().st_mtime_ns
    assert flops.measure(str(folder), LoraConfig(rank=4), 16) == counted and file.stat().st_mtime_ns == written
    assert flops.measure(str(folder), LoraConfig(rank=8), 16).trained == 2 * counted.trained
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="cut or damaged"):
        flops.measure(str(folder), LoraConfig(rank=4), 16)
