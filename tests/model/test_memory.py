"""Predicted memory: against what a step really takes, and what follows from shapes alone."""

import json
from dataclasses import replace

import pytest
import torch

from granite_scu.config.settings import TINY_MODEL, BaseConfig, LoraConfig
from granite_scu.model import loading, memory

SETTING = memory.Setting(BaseConfig(TINY_MODEL), LoraConfig(), torch.float32, batch_size=4, block_size=64, device="cpu")


@pytest.fixture(scope="module")
def config():
    return loading.load_model_config(TINY_MODEL)


def checkpointed(setting: memory.Setting) -> memory.Setting:
    return replace(setting, base=replace(setting.base, gradient_checkpointing=True))


def counted(setting: memory.Setting) -> int:
    """The most bytes of tensors that a step of the real model, with real contents, holds on top of its parameters."""
    module = real_module(setting)
    live = memory._Live()
    for tensor in module.parameters():
        live.hold(tensor)
        if tensor.requires_grad:
            tensor.grad = torch.zeros_like(tensor)
            live.hold(tensor.grad)
    before = live.now
    ids = torch.arange(setting.batch_size * setting.block_size).view(setting.batch_size, setting.block_size)
    with live:
        with torch.autocast("cpu", setting.dtype, enabled=setting.dtype != torch.float32):
            nats = module(ids, ids, torch.zeros_like(ids))
        nats.backward()
    return live.peak - before


def real_module(setting: memory.Setting):
    from granite_scu.config.settings import OptimizerConfig, PriorConfig
    from granite_scu.training.module import GraniteModule

    module = GraniteModule(setting.base, setting.lora, OptimizerConfig(), PriorConfig(0.02, 1000), 10, setting.dtype)
    module.configure_model()
    return module


@pytest.mark.parametrize(
    "setting",
    [
        SETTING,
        checkpointed(SETTING),
        replace(SETTING, dtype=torch.bfloat16, batch_size=2, lora=LoraConfig(rank=64)),
        replace(SETTING, base=BaseConfig(TINY_MODEL, quantize_4bit=True)),
    ],
    ids=["plain", "checkpointed", "bf16", "4 bits"],
)
def test_few_layers_without_contents_stand_for_the_whole_model(config, setting):
    footprint = memory.predict(config, setting)
    assert footprint.step == pytest.approx(counted(setting), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [SETTING, checkpointed(SETTING)], ids=["plain", "checkpointed"])
def test_a_large_batch_is_extrapolated_from_smaller_ones(config, setting, monkeypatch):
    large = replace(setting, batch_size=60, block_size=128)
    taken = memory._simulate(config, large)
    monkeypatch.setattr(memory, "SIMULATED", 16 * 128)
    assert memory.predict(config, large).total == pytest.approx(taken.total, rel=0.03)
    huge = replace(large, batch_size=2**20)
    assert memory.predict(config, huge).total > 10_000 * taken.total


@pytest.mark.parametrize("experts", [False, True])
def test_a_mixture_is_predicted_with_and_without_adapters_of_its_experts(small_mixture, experts):
    base, lora = BaseConfig(small_mixture), LoraConfig(rank=8, experts=experts)
    setting = replace(SETTING, base=base, lora=lora, block_size=256)
    footprint = memory.predict(loading.load_model_config(small_mixture), setting)
    mask = 4 * setting.batch_size * setting.block_size**2  # predicted whole; attention on a CPU makes it chunk by chunk
    real = counted(setting)
    assert 0.99 * real <= footprint.step <= real + mask
    trained = [p for p in real_module(setting).parameters() if p.requires_grad]
    assert footprint.adapters == 4 * sum(p.nbytes for p in trained)


def test_weights_and_adapters_are_what_the_model_has(config):
    module = real_module(SETTING)
    footprint = memory.predict(config, SETTING)
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    assert footprint.adapters == 4 * trained  # weights, gradients, two moments
    assert footprint.weights == pytest.approx(sum(p.nbytes for p in module.parameters()) - trained, rel=1e-3)
    assert footprint.total == footprint.weights + footprint.adapters + footprint.step


def test_4_bit_weights_are_as_large_as_those_of_bitsandbytes(config):
    setting = replace(SETTING, base=BaseConfig(TINY_MODEL, quantize_4bit=True))
    held = 0
    for parameter in real_module(setting).parameters():
        held += 0 if parameter.requires_grad else parameter.nbytes
        state = getattr(parameter, "quant_state", None)
        held += state.absmax.nbytes + state.state2.absmax.nbytes if state else 0
    assert memory.predict(config, setting).weights == pytest.approx(held, rel=0.01)


def test_a_layer_that_is_left_out_of_4_bits_is_counted_whole(config, monkeypatch):
    setting = replace(SETTING, base=BaseConfig(TINY_MODEL, quantize_4bit=True))
    before = memory._simulate(config, setting).weights  # what predict would keep
    monkeypatch.setitem(loading.READ_PAST, config.model_type, ("in_proj",))
    assert memory._simulate(config, setting).weights > 1.1 * before


def test_shared_layers_are_counted_by_their_share_and_two_as_wholes(config):
    whole, shared = (memory.predict(config, replace(SETTING, sharing=n)).weights for n in (1, 4))
    model = loading.load_model(BaseConfig(TINY_MODEL), SETTING.dtype)
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    assert shared == pytest.approx(whole - 0.75 * sum(sizes) + 2 * max(sizes), rel=1e-6)


def test_what_takes_less_is_predicted_to_take_less(config):
    plain = memory.predict(config, SETTING)
    assert memory.predict(config, checkpointed(SETTING)).total < 0.6 * plain.total
    assert memory.predict(config, replace(SETTING, batch_size=2)).step < 0.6 * plain.step  # half, and what is fixed
    assert memory.predict(config, replace(SETTING, processes=2)).adapters > memory.predict(config, SETTING).adapters


def test_a_model_that_is_not_granite_is_predicted_too():
    from transformers import BambaConfig, LlamaConfig

    llama = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    bamba = BambaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, attn_layer_indices=[1],
    )  # fmt: skip
    assert memory.predict(bamba, SETTING).step > 0  # its kinds of layers follow from other settings
    few, many = memory.predict(llama, SETTING), memory.predict(llama, replace(SETTING, batch_size=8))
    assert 1.9 * few.step < many.step < 2.1 * few.step


def test_of_a_model_that_cannot_be_simulated_the_step_is_not_predicted(caplog, tmp_path, monkeypatch):
    from transformers import JetMoeConfig

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reads_numbers = JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8,
        num_local_experts=4,
    )  # fmt: skip
    found = memory.predict(reads_numbers, replace(SETTING, batch_size=64, block_size=1024))
    assert found.step is None and found.total == found.weights + found.adapters > 0
    assert "not predicted: a jetmoe model cannot be simulated here (DataDependent" in caplog.text
    assert not list(tmp_path.rglob("memory.json"))


def test_a_prediction_is_kept_for_a_shape_and_one_that_cannot_be_is_made_again(config, tmp_path, monkeypatch):
    made = []

    def simulate(_, setting):
        made.append(setting)
        return memory.Footprint(1, 2, setting.batch_size)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(memory, "_simulate", simulate)
    predicted, file = memory.predict(config, SETTING), tmp_path / "granite-scu" / "memory.json"
    open_still = replace(SETTING, base=replace(SETTING.base, gradient_checkpointing=None))
    assert memory.predict(config, SETTING) == memory.predict(config, open_still) == predicted
    assert len(made) == 1
    (name,) = json.loads(file.read_text())
    for damage in ({"weights": 1, "adapters": 2}, 3):
        file.write_text(json.dumps({name: damage}))
        assert memory.predict(config, SETTING) == predicted
    assert len(made) == 3
    assert memory.predict(config, replace(SETTING, batch_size=8)).step == 8
    assert len(json.loads(file.read_text())) == 2
