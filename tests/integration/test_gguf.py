"""Through everything from a GGUF file: it is trained on, and merged into, what its weights dequantise to."""

import json

import pytest
import torch
from outcomes import done
from references import HEADS, write_gguf
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from granite_scu.cli import main as commands
from granite_scu.config.settings import TINY_MODEL
from granite_scu.export.merge import round_to_4_bits
from granite_scu.model import finding
from granite_scu.model.loading import load_tokenizer

pytest.importorskip("gguf")

LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.slow
@pytest.mark.parametrize("in_4_bits", [False, True])
def test_it_is_trained_scored_asked_and_merged(in_4_bits, train, call, tmp_path, monkeypatch):
    if in_4_bits:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    file, out = tmp_path / "small.gguf", tmp_path / "merged"
    write_gguf(file, load_tokenizer(TINY_MODEL), LlamaForCausalLM(LlamaConfig(**sizes, **HEADS, initializer_range=0.2)))
    flags = ("--4bit-quantization",) if in_4_bits else ()
    run = train("--model", file, "--learning-rate", 1e-2, "--controller", "none", "--warmup-steps", 0, *flags)
    assert json.loads((run / "training_config.json").read_text())["base"]["name"] == str(file)
    for command in (
        ("generate", run, "--prompt", "def f(x):", "--max-new-tokens", 3),
        ("eval", run),
        ("merge", run, "--out", out),
    ):
        done(call, commands.main, *command)
    base = load_file(f"{finding.resolve(str(file))}/model.safetensors")[f"{LAYER}.weight"]
    factors, config = (
        load_file(run / "adapter_model.safetensors"),
        json.loads((run / "adapter_config.json").read_text()),
    )
    a, b = (factors[f"base_model.model.{LAYER}.lora_{factor}.weight"].float() for factor in "AB")
    seen = round_to_4_bits(base, torch.float32) if in_4_bits else base
    expected = (seen.float() + config["lora_alpha"] / config["r"] * (b @ a)).to(base.dtype)
    assert torch.equal(load_file(out / "model.safetensors")[f"{LAYER}.weight"], expected)
    assert not torch.equal(expected, base)
