import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from granite_scu.config.settings import TINY_MODEL
from granite_scu.data.sources import corpora
from granite_scu.model import loading
from research import pretrain_tiny as pretrain
from research.comparison.package_docs import package_docs

MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")


@pytest.fixture
def tokenizer():
    return loading.load_tokenizer(TINY_MODEL)


def test_the_library_is_learned_but_for_the_packages_that_are_held_out():
    """And shares no document with the docstrings that research trains on."""
    learned = pretrain.pretraining_source()
    packages = {document.name.split("/")[0].removesuffix(".py") for document in learned}
    assert learned and not any(corpora.is_held_out(package) for package in packages)
    seen = {document.text for document in learned}
    assert seen.isdisjoint(document.text for document in package_docs())


@pytest.mark.parametrize("architecture", pretrain.ARCHITECTURES)
def test_each_is_a_granite_of_its_size(architecture, tokenizer):
    model = pretrain.build_model(tokenizer, architecture)
    assert model.config.model_type in loading.TESTED_TYPES
    assert 1 not in {getattr(model.config, name) for name in MULTIPLIERS}
    least, most = (20e6, 40e6) if architecture == "quarter" else (0, 4e6)
    assert least < sum(p.numel() for p in model.parameters()) < most


def test_no_two_have_the_same_width_or_depth(tokenizer):
    configs = [pretrain.build_model(tokenizer, name).config for name in pretrain.ARCHITECTURES]
    assert len({config.hidden_size for config in configs}) == len(configs)
    assert len({config.num_hidden_layers for config in configs}) == len(configs)


def test_the_first_is_the_embedded_model(tokenizer):
    fresh, embedded = pretrain.build_model(tokenizer).config, loading.load_model_config(TINY_MODEL)
    told_later = {"dtype", "_name_or_path", "transformers_version", "architectures"}
    assert {key: value for key, value in fresh.to_dict().items() if key not in told_later} == {
        key: value for key, value in embedded.to_dict().items() if key not in told_later
    }


@pytest.mark.parametrize(
    ("architecture", "until"), [("wide-hybrid", ("--minutes", "1e-6")), ("dense", ("--steps", "1"))]
)
def test_a_base_is_made_of_texts(architecture, until, tmp_path, monkeypatch):
    texts = tmp_path / "texts.jsonl"
    lines = ({"name": str(i), "text": f"The {i}th document speaks of {i * i} birds. " * 8} for i in range(60))
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept, held_out = pretrain.texts([texts], with_source=False)
    assert len(kept) + len(held_out) == 60 and 0 < len(held_out) < 20

    folder = tmp_path / "base"
    arguments = ["--architecture", architecture, "--text", str(texts), *until, "--batch-size", "2"]
    monkeypatch.setattr(sys, "argv", ["pretrain_tiny.py", *arguments, "--length", "16", "--output-dir", str(folder)])
    pretrain.main()
    record = json.loads((folder / "pretraining.json").read_text())
    assert record["architecture"] == architecture and record["steps"] == record["of_steps"] == 1
    assert record["text"].keys() == {"texts.jsonl"} and record["held_out_bits_per_byte"] > 0
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
