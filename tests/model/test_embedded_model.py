"""The embedded model is a real Granite hybrid, small enough to ship, with Granite's own conventions."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from granite_scu.config.settings import TINY_MODEL
from granite_scu.data.sources.corpora import held_out_source
from granite_scu.model.loading import resolve

FOLDER = Path(resolve(TINY_MODEL))
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture
def tokenizer():
    return TOKENIZER


def test_it_takes_at_most_8_mb():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000


def test_it_has_granites_structure():
    config = AutoConfig.from_pretrained(FOLDER)
    assert config.architectures == ["GraniteMoeHybridForCausalLM"]
    assert {"linear_attention", "full_attention"} == set(config.layer_types)
    assert config.num_local_experts == 0
    assert config.tie_word_embeddings
    assert config.position_embedding_type is None
    multipliers = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    assert all(getattr(config, name) != 1 for name in multipliers)


def test_its_weights_are_finite_bf16_safetensors():
    tensors = load_file(FOLDER / "model.safetensors").values()
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors)


def test_its_special_tokens_are_granites(tokenizer):
    for token in ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"):
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1
    assert tokenizer.eos_token == "<|end_of_text|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_its_chat_template_writes_granites_format(tokenizer):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == (
        "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>Yes<|end_of_text|>\n"
    )
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|start_of_role|>assistant<|end_of_role|>")


@settings(max_examples=40)
@given(st.text(max_size=200).filter(lambda text: "<|" not in text))
def test_its_tokenizer_loses_no_byte(text):
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


def test_it_scores_what_its_record_says_on_packages_it_has_never_seen(tokenizer):
    # On a part of the held-out text, hence the tolerance; a model that had not learned would need about 3.7.
    record = json.loads((FOLDER / "pretraining.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    texts = [document.text for document in held_out_source()[::16][:40]]
    length = 256
    ids = torch.tensor([i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]][:2049])
    inputs, labels = ids[:-1].view(-1, length), ids[1:].view(-1, length)
    with torch.no_grad():
        nats = sum(
            F.cross_entropy(model(x, use_cache=False).logits.flatten(0, 1), y.flatten(), reduction="sum").item()
            for x, y in zip(inputs.split(16), labels.split(16), strict=True)
        )
    n_bytes = len(tokenizer.decode(labels.flatten()).encode())
    assert nats / math.log(2) / n_bytes == pytest.approx(record["held_out_bits_per_byte"], rel=0.15)
