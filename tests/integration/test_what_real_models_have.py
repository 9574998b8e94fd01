"""Through everything with small models that have what real ones have, and the embedded one has not."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from outcomes import done
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from granite_scu.cli import main as commands
from granite_scu.config.settings import TINY_MODEL
from granite_scu.model.loading import load_model_config, load_tokenizer

CHATML = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION, ANSWER = "Is it 7?", "Yes, that is so."
LLAMA = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3}
HYBRID = {"hidden_size": 64, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
HYBRID |= {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "num_attention_heads": 4}
HYBRID |= {"num_key_value_heads": 2, "shared_intermediate_size": 48, "initializer_range": 0.3}


def tokenizer(begins: bool) -> PreTrainedTokenizerFast:
    """The embedded tokenizer's tokens and those of ChatML; without a limit of length, and no padding of its own.

    Args:
        begins: whether it adds a token that begins a text, as its chat template does.
    """
    ours = load_tokenizer(TINY_MODEL)
    backend = ours.backend_tokenizer
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|unk|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **special, **({"bos_token": "<s>"} if begins else {}))
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    if begins:
        added = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.bos_token_id)])
        made.backend_tokenizer.post_processor = added
    made.chat_template = CHATML if begins else CHATML.replace("{{ bos_token }}", "")
    assert made.model_max_length == VERY_LARGE_INTEGER and made.pad_token_id == made.eos_token_id
    return made


def llama(tokenizer, **more) -> LlamaConfig:
    return LlamaConfig(**({"vocab_size": len(tokenizer)} | LLAMA | more))


def hybrid(tokenizer, **more):
    config = load_model_config(TINY_MODEL)
    config.update(HYBRID | {"vocab_size": len(tokenizer)} | more)
    return config


MODELS = {
    # As Llama 3.2: one head for both ends, a token that begins each text.
    "tied-llama": (True, llama, {"tie_word_embeddings": True}, "1GB"),
    # As Qwen and Mistral: a head of its own, more rows than tokens, no token that begins a text.
    "padded-llama": (False, llama, {"tie_word_embeddings": False, "vocab_size": 4160}, "500KB"),
    "padded-hybrid": (True, hybrid, {"tie_word_embeddings": True, "vocab_size": 4160}, "200KB"),
}


@pytest.fixture(scope="module", params=MODELS)
def base(request, tmp_path_factory) -> Path:
    """Folder of a model with random weights in bf16, as transformers 4 named that."""
    begins, config, more, shard = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    tokens = tokenizer(begins)
    ends = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(tokens, **more, **ends, bos_token_id=tokens.bos_token_id), dtype=torch.bfloat16
    )
    torch.nn.init.normal_(model.get_input_embeddings().weight.data, std=0.6)  # that of padding begins as zeros
    model.save_pretrained(folder, max_shard_size=shard)
    tokens.save_pretrained(folder)
    config_file = folder / "config.json"
    config_file.write_text(config_file.read_text().replace('"dtype"', '"torch_dtype"'))
    assert "torch_dtype" in config_file.read_text()
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard != "1GB")
    return folder


@pytest.fixture(scope="module")
def run(base, call, tmp_path_factory):
    """Trains on chats with one answer, stopped halfway and resumed as well as in one go; returns both folders."""
    folder = tmp_path_factory.mktemp("run")
    chats = folder / "chats.jsonl"
    write_chats(chats, (f"Is it {number}?" for number in range(30)))
    flags = ("--model", base, "--data-dir", chats, "--accelerator", "cpu", "--precision", "fp32", "--samples", 0)
    flags += ("--block-size", 64, "--batch-size", 2, "--gradient-accumulation-steps", 1, "--controller", "none")
    flags += ("--max-steps", 40, "--save-steps", 20, "--warmup-steps", 0, "--learning-rate", "2e-2")
    done(call, commands.main, "train", *flags, "--output-dir", folder / "whole")
    resume = ("--resume-from-checkpoint", folder / "whole" / "checkpoint-20")
    done(call, commands.main, "train", *flags, *resume, "--output-dir", folder / "resumed")
    return SimpleNamespace(whole=folder / "whole", resumed=folder / "resumed")


def write_chats(path: Path, questions: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": asked, "completion": ANSWER}) + "\n" for asked in questions))


def plain(base: Path, run: Path):
    """Tokenizer, base and adapter, by transformers and PEFT alone."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(run), PeftModel.from_pretrained(model, run).eval()


def test_it_trains_and_resumes_to_the_same_bytes(run):
    one, two = ((folder / "adapter_model.safetensors").read_bytes() for folder in (run.whole, run.resumed))
    assert one == two
    metrics = json.loads((run.whole / "scu_metrics.json").read_text())
    assert metrics["adapter_test_bpt"] < 0.1 < metrics["base_test_bpt"]


def test_it_is_scored_as_plain_transformers_scores_it(run, base, call, tmp_path):
    """The answer and the end of its turn, after what the template renders: a token that begins a text comes once."""
    unseen = QUESTION.replace("7", "seven")
    write_chats(tmp_path / "chat.jsonl", [unseen])
    scored = ("--data-dir", tmp_path / "chat.jsonl", "--json", "--precision", "fp32", "--samples", 0)
    out = done(call, commands.main, "eval", run.whole, *scored)
    tokens, model = plain(base, run.whole)
    prompt = [{"role": "user", "content": unseen}]
    asked = tokens.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    answer = tokens(ANSWER, add_special_tokens=False)["input_ids"] + [tokens.eos_token_id]
    assert asked.count(tokens.bos_token_id) == (tokens.bos_token is not None)
    ids = torch.tensor([asked + answer])
    with torch.no_grad():
        adapted = model(ids).logits[0, len(asked) - 1 : -1]
        with model.disable_adapter():
            before = model(ids).logits[0, len(asked) - 1 : -1]
    expected = [F.cross_entropy(logits, ids[0, len(asked) :]).item() / math.log(2) for logits in (before, adapted)]
    # Sums in another order: some ten roundings of logits below 40, each of 40 x 2**-24, over ln 2.
    found = [each["bits_per_token"] for each in json.loads(out)["models"]]
    assert found == pytest.approx(expected, abs=1e-4)


def test_it_ends_its_turn_and_is_published(run, call):
    """Though the token that ends it is the one that pads; the base, which never ends, has all the tokens it may."""
    out = done(call, commands.main, "generate", run.whole, "--chat", "--prompt", QUESTION, "--max-new-tokens", 20)
    assert out.rstrip().endswith(f"adapter: {run.whole}\n{ANSWER}")
    publish = ("--repo-id", "ada/yes", "--base-model-id", "ada/base", "--license", "mit", "--dry-run")
    out = done(call, commands.main, "publish", run.whole, *publish)
    assert {"adapter_model.safetensors", "tokenizer_config.json", "chat_template.jinja"} <= set(out.split())


def test_merged_it_is_the_base_and_its_update_in_the_same_files(run, base, call, tmp_path):
    out = tmp_path / "merged"
    done(call, commands.main, "merge", run.whole, "--out", out, "--dtype", "fp32")
    tokens, model = plain(base, run.whole)
    merged = AutoModelForCausalLM.from_pretrained(out)
    ids = tokens(QUESTION, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected, found = model(ids).logits, merged(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    shapes = [{path.name: {*load_file(path)} for path in folder.glob("*.safetensors")} for folder in (base, out)]
    assert shapes[0] == shapes[1]
