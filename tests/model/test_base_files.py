"""A base model whose files are not what they should be is refused by name, with the remedy, before anything trains."""

import json

import pytest
import torch
from outcomes import refusal
from references import HEADS, SIZES, granite, llama
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel, Gemma3Config, LlamaConfig, LlamaForCausalLM, T5Config

from granite_scu.config.errors import UserError
from granite_scu.config.settings import BaseConfig, LoraConfig
from granite_scu.model import adapters, base_files, flops, loading
from granite_scu.model.loss import summed_nats

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def loaded(folder, **changed):
    return loading.load_model(BaseConfig(str(folder), **changed), torch.float32)


def planned(folder):
    """What ``plan`` and the start of ``train`` ask."""
    return flops.measure(str(folder), LoraConfig(), 16)


def refused(look, folder) -> str:
    return refusal(look, folder, begins=f"--model {folder}: ")


def with_tensors(change):
    """Changes the tensors of a saved model."""

    def apply(folder):
        tensors = load_file(folder / SINGLE)
        save_file(change(tensors), folder / SINGLE, {"format": "pt"})

    return apply


def with_config(**changed):
    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))

    return apply


def without(name):
    return with_tensors(lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name})


UP = "model.layers.0.mlp.up_proj.weight"

ROPE = {"rope_parameters": {"rope_type": "yarnn", "rope_theta": 1e4, "factor": 4.0}}
"""A kind of positions that transformers has not."""

LOOKS = pytest.mark.parametrize("look", [planned, loaded], ids=["plan", "load"])


@LOOKS
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            with_tensors(lambda tensors: {f"net.{key}": tensor for key, tensor in tensors.items()}),
            ["lack 12 of the 12 tensors of this llama model (lm_head.weight, ", "hold 12 tensors that it has no place"],
        ),
        (without(UP), [f"lack 1 of the 12 tensors of this llama model ({UP})"]),
        (without("lm_head.weight"), ["lack 1 of the 12", "(lm_head.weight)"]),
        (
            with_tensors(lambda tensors: tensors | {UP: torch.zeros(3, 16)}),
            [f"hold 1 tensors of other shapes than config.json says ({UP} is 3 x 16 and should be 24 x 16)"],
        ),
        (with_config(num_hidden_layers=2), ["lack 9 of the 21"]),
        (
            with_tensors(lambda tensors: tensors | {UP.replace("0", "1"): torch.zeros(24, 16)}),
            [f"hold 1 tensors that it has no place for ({UP.replace('0', '1')})"],
        ),
    ],
    ids=["renamed", "one dropped", "head", "shape", "a layer too few", "a layer too many"],
)
def test_weights_that_are_missing_unexpected_or_misshapen_are_named(look, spoil, words, tmp_path):
    llama().save_pretrained(tmp_path)
    spoil(tmp_path)
    message = refused(look, tmp_path)
    assert all(word in message for word in words), message


@LOOKS
@pytest.mark.parametrize("kind", ["tied", "untied", "granitemoe", "buffers of old files", "shards"])
def test_what_sound_files_have_is_no_difference(look, kind, tmp_path):
    """A head that is the embedding, experts that transformers puts together, and what every model computes itself."""
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=kind == "tied"))
    model = granite("granitemoe") if kind == "granitemoe" else tied
    model.save_pretrained(tmp_path, max_shard_size="2KB" if kind == "shards" else "1GB")
    assert (tmp_path / INDEX).is_file() == (kind == "shards")
    if kind == "buffers of old files":
        old = {f"model.layers.0.{name}": torch.ones(4) for name in ("self_attn.rotary_emb.inv_freq", "attn.bias")}
        with_tensors(lambda tensors: tensors | old)(tmp_path)
    look(tmp_path)


def cut(folder):
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: len(content) // 2])


def pointer(name):
    def apply(folder):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n")

    return apply


def pickled(folder):
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def without_a_shard(folder):
    llama().save_pretrained(folder, max_shard_size="2KB")
    (folder / SINGLE).unlink()
    min(folder.glob("model-00002*")).unlink()


@LOOKS
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, f"{SINGLE} is cut or damaged"),
        (pointer(SINGLE), f"{SINGLE} is a git-lfs pointer"),
        (pointer("tokenizer.json"), "tokenizer.json is a git-lfs pointer"),
        (pointer("config.json"), "config.json is a git-lfs pointer"),
        (pickled, "convert them to safetensors"),
        (without_a_shard, f".safetensors is missing, which {INDEX} names"),
    ],
    ids=["cut", "lfs weights", "lfs tokenizer", "lfs config", "bin", "shard"],
)
def test_files_that_are_cut_missing_or_of_another_kind_are_named(look, spoil, words, tmp_path):
    llama().save_pretrained(tmp_path)
    spoil(tmp_path)
    assert words in refused(look, tmp_path)


def test_the_command_for_pickled_weights_makes_a_folder_that_loads(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "old")
    pickled(tmp_path / "old")
    loading.load_tokenizer("tiny-granite-h").save_pretrained(tmp_path / "old")
    command = refused(loaded, tmp_path / "old").partition('python -c "')[2].rpartition('"')[0]
    monkeypatch.chdir(tmp_path)
    exec(command, {})
    expected = load_file(tmp_path / "converted" / SINGLE)
    found = loaded(tmp_path / "converted").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "converted" / "tokenizer.json").is_file()


@LOOKS
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (gptq)"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised (awq)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised (fp8)"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantised (compressed-tensors)"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised (mxfp4)"),
        ({"quantization_config": {"load_in_8bit": True, "quant_method": "bitsandbytes"}}, "quantised (bitsandbytes)"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantised for MLX"),
    ],
    ids=lambda value: value.partition("(")[2] or value[-3:] if isinstance(value, str) else "",
)
def test_weights_quantised_by_others_are_refused_with_what_to_take_instead(look, settings, words, tmp_path):
    llama().save_pretrained(tmp_path)
    with_config(**settings)(tmp_path)
    message = refused(look, tmp_path)
    assert words in message and "take the model that it was made from" in message


@LOOKS
@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_model_that_does_not_continue_text_is_refused(look, kind, tmp_path):
    if kind == "bert":
        BertLMHeadModel(BertConfig(**SIZES, num_attention_heads=2)).save_pretrained(tmp_path)
    else:
        T5Config(d_model=16, num_layers=1).save_pretrained(tmp_path)
    assert f"a {kind} model is no causal language model" in refused(look, tmp_path)


def test_a_model_that_reads_pictures_too_is_refused():
    with pytest.raises(UserError, match="a gemma3 model reads pictures or sound beside text"):
        base_files.check_kind(Gemma3Config(), "mine")


@LOOKS
@pytest.mark.parametrize("wrong", [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"model_type": []}, ROPE])
def test_a_wrong_value_in_the_configuration_is_one_line(look, wrong, tmp_path):
    llama().save_pretrained(tmp_path)
    with_config(**wrong)(tmp_path)
    why = refused(look, tmp_path).partition("cannot be loaded: ")[2]
    assert why and (wrong is not ROPE or "KeyError: 'yarnn'" in why)


def test_an_adapter_is_no_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert f"--adapter {tmp_path}" in refused(loading.load_tokenizer, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "move adapter_config.json away" in refused(loading.load_tokenizer, tmp_path)


@pytest.mark.parametrize("in_4_bits", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named_and_no_learning_rate_blamed(value, in_4_bits, tmp_path):
    if in_4_bits:
        pytest.importorskip("bitsandbytes")
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.data[3, 5] = value
    model.save_pretrained(tmp_path)
    message = refused(lambda folder: loaded(folder, quantize_4bit=in_4_bits), tmp_path)
    assert UP in message and "NaN or infinity" in message and "learning" not in message


def test_weights_that_bitsandbytes_has_put_in_4_bits_are_trained_on(tmp_path):
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path / "whole")
    loaded(tmp_path / "whole", quantize_4bit=True).save_pretrained(tmp_path / "packed")
    assert planned(tmp_path / "packed") == planned(tmp_path / "whole")
    model = loaded(tmp_path / "packed")
    adapted = adapters.attach(model, LoraConfig(rank=2))
    tokens = torch.arange(2, 40)[None]
    summed_nats(model, tokens, tokens.roll(-1, 1)).backward()
    assert adapters.untrained(adapters.low_rank_updates(adapted)) == []
