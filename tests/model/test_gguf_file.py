"""A GGUF file is trained on as what its weights dequantise to, which are made once and read by everything."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from outcomes import refusal
from references import HEADS, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from granite_scu.config.settings import TINY_MODEL, BaseConfig
from granite_scu.model import finding, loading

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **HEADS, initializer_range=0.2, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def file(original, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "small.gguf"
    write_gguf(path, loading.load_tokenizer(TINY_MODEL), original)
    return path


@pytest.fixture
def copy(file, tmp_path):
    return Path(shutil.copy(file, tmp_path / "copy.gguf"))


def loaded(name):
    return loading.load_model(BaseConfig(str(name)), torch.float32)


def refused(name) -> str:
    return refusal(loading.load_model_config, str(name), begins=f"--model {name}: ")


def test_the_model_has_the_dequantised_weights_in_bf16_and_the_tokenizer(file, original):
    model, text = loaded(file), "def f(x):\n    return 1024"
    found, wanted = (loading.load_tokenizer(name)(text)["input_ids"] for name in (str(file), TINY_MODEL))
    assert found == wanted
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for ours, theirs in {"mlp.down_proj": "ffn_down", "self_attn.o_proj": "attn_output"}.items():
        tensor = stored[f"blk.0.{theirs}.weight"]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(model.get_parameter(f"model.layers.0.{ours}.weight"), values.bfloat16().float())
    # Q8_0 rounds by up to 1/254 of a block's largest value and bf16 by 1/512 of each: logits differ by some hundredths,
    # and by their own size where the halves of q and k that are turned together are the wrong ones.
    tokens = torch.arange(2, 40)[None]
    found, wanted = (each(input_ids=tokens).logits for each in (model, original))
    assert (found - wanted).norm() < 0.1 * wanted.norm()
    assert not hasattr(model.config, "quantization_config")


def test_a_folder_with_one_means_it_and_it_is_dequantised_once_until_it_changes(copy):
    folder = Path(finding.resolve(str(copy)))
    made = (folder / "model.safetensors").stat().st_mtime_ns
    finding._dequantised.cache_clear()  # as in another process
    assert finding.resolve(str(copy.parent)) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    os.utime(copy, (1, 1))
    assert finding.resolve(str(copy)) != str(folder)


def test_several_in_a_folder_are_listed_and_none_is_guessed(copy):
    shutil.copy(copy, copy.with_name("other.gguf"))
    assert "name one of them: copy.gguf, other.gguf" in refused(copy.parent)


def test_weights_beside_it_come_first(copy, original):
    original.save_pretrained(copy.parent)
    assert finding.resolve(str(copy.parent)) == str(copy.parent)


def test_what_is_no_gguf_is_said(copy, tmp_path, monkeypatch):
    assert "no such file" in refused(tmp_path / "nowhere.gguf")
    text = tmp_path / "notes.txt"
    text.write_text("GGU")
    assert "is no GGUF file" in refused(text)
    whole = copy.read_bytes()
    copy.write_bytes(whole[: len(whole) // 2])
    assert "it is cut, or of a kind" in refused(copy)
    monkeypatch.setattr(finding, "find_spec", lambda name: None)
    assert "pip install 'granite-scu[gguf]'" in refused(copy)


def test_a_tensor_that_the_file_lacks_is_named(tmp_path, original):
    less = {name: tensor for name, tensor in original.state_dict().items() if "up_proj" not in name}
    model = LlamaForCausalLM(original.config)
    model.state_dict = lambda: less
    write_gguf(tmp_path / "lacking.gguf", loading.load_tokenizer(TINY_MODEL), model)
    message = refused(tmp_path / "lacking.gguf")
    assert "lack 1 of the" in message and "up_proj" in message
