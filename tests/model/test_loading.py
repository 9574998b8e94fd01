import gc
import http.server
import importlib.util
import logging
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from outcomes import refusal
from references import granite
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, FalconConfig, GraniteConfig, MambaConfig, MistralConfig
from transformers.utils import logging as transformers_logging

from granite_scu.config import hub as hub_module
from granite_scu.config.errors import UserError
from granite_scu.config.progress import Heartbeat
from granite_scu.config.settings import TINY_MODEL, BaseConfig, LoraConfig
from granite_scu.model import adapters, loading
from granite_scu.model.loss import summed_nats
from granite_scu.model.mamba2 import mamba

needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")

TOKENS = torch.arange(2, 40)[None]

MAPS = Path("/proc/self/maps")


@pytest.fixture
def offline(monkeypatch):
    """As with HF_HUB_OFFLINE=1, which huggingface_hub reads once, when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def logits_of(model):
    return model(input_ids=TOKENS, use_cache=False).logits


def refused(load, name) -> str:
    return refusal(load, name, begins=f"--model {name}: ")


def load_fp32(name):
    return loading.load_model(BaseConfig(name), torch.float32)


LOADERS = pytest.mark.parametrize("load", [load_fp32, loading.load_tokenizer, loading.load_model_config])


def test_the_embedded_model_comes_frozen_with_its_scan_in_place():
    model = load_fp32(TINY_MODEL)
    assert model.config.model_type in loading.TESTED_TYPES
    assert not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    layer = next(m for m in model.modules() if mamba.is_mamba2(m))
    assert layer.forward.__module__ == mamba.__name__


def test_a_long_load_says_how_far_it_is_and_what_is_left(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("granite_scu"), "propagate", True)
    caplog.set_level("INFO", "granite_scu")
    monkeypatch.setattr(Heartbeat, "is_due", lambda self: True)
    load_fp32(TINY_MODEL)
    lines = [line for line in caplog.messages if line.startswith(f"loading the weights of {TINY_MODEL}: ")]
    assert len(lines) > 20 and lines[0].partition(": ")[2].startswith("2 %") and "left" in lines[0]
    assert not transformers_logging.set_tqdm_hook(None), "transformers has its own bars again"


def test_weights_are_held_in_the_dtype_asked_for():
    model = loading.load_model(BaseConfig(TINY_MODEL), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_saved_model_is_loaded_from_its_folder(tmp_path):
    original = load_fp32(TINY_MODEL)
    original.save_pretrained(tmp_path / "mine")
    loading.load_tokenizer(TINY_MODEL).save_pretrained(tmp_path / "mine")
    name = str(tmp_path / "mine")
    torch.testing.assert_close(logits_of(load_fp32(name)), logits_of(original))
    assert loading.load_tokenizer(name).get_vocab() == loading.load_tokenizer(TINY_MODEL).get_vocab()
    assert loading.load_model_config(name).model_type == "granitemoehybrid"


@LOADERS
def test_a_folder_without_a_model_is_refused(load, tmp_path):
    assert "holds no config.json" in refused(load, str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere/at/all", "a/b/c", "tiny-granit"])
def test_a_path_that_does_not_exist_is_refused(name):
    message = refused(loading.load_model_config, name)
    assert "no such folder" in message and TINY_MODEL in message


@LOADERS
def test_a_hub_model_that_cannot_be_had_is_refused_in_one_line(load, offline):
    message = refused(load, "granite-scu-tests/no-such-model")
    assert "it is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub" in message and TINY_MODEL in message


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for a repository that is gated, and for one that there is not."""

    def do_HEAD(self):
        self.send_response(403 if "/gated/" in self.path else 401)
        self.send_header("X-Error-Code", "GatedRepo" if "/gated/" in self.path else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine that has nothing; gives it, and takes it away."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path),
        "HUGGINGFACE_CO_URL_TEMPLATE": f"http://127.0.0.1:{server.server_port}"
        "/{repo_id}/resolve/{revision}/{filename}",
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    yield server
    server.shutdown()
    server.server_close()


def test_a_gated_and_a_mistyped_name_are_told_apart(hub, caplog):
    caplog.set_level("INFO", "granite_scu")
    assert "it is gated; accept its licence at http://127.0.0.1" in refused(loading.load_tokenizer, "gated/model")
    assert caplog.messages == ["looking up gated/model on the Hugging Face hub"]
    assert "the hub has no model of that name, or it is private" in refused(loading.load_tokenizer, "nobody/model")


def test_a_hub_that_cannot_be_reached_is_named_within_seconds(hub):
    """The hub's library would try again for most of a minute."""
    hub.shutdown()
    hub.server_close()
    began = time.monotonic()
    assert "cannot be reached, and the model is not in the cache" in refused(loading.load_tokenizer, "any/model")
    assert time.monotonic() - began < 10
    assert not constants.HF_HUB_OFFLINE, "the next may find it"


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_module, "SECONDS", 0.3)
        assert "cannot be reached" in refused(loading.load_tokenizer, "some/model")


def without_weights(folder):
    (folder / "config.json").write_text(GraniteConfig(num_hidden_layers=1).to_json_string())


@pytest.mark.parametrize("is_offline", [False, True])
@pytest.mark.parametrize(
    ("contents", "why"),
    [
        ("{", "not a valid JSON file"),
        ('{"model_type": "granite5"}', "does not know its type granite5; a newer one may: pip install --upgrade"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}', "code of its own, which is never run"),
        ('{"model_type": "vit"}', "no causal language model"),
        ('{"model_type": "llama", "dtype": "bf16"}', "config.json has the dtype 'bf16'"),
        (without_weights, "no file named model.safetensors"),
    ],
    ids=["damaged", "too new", "code", "images", "numbers", "no weights"],
)
def test_a_folder_that_cannot_be_loaded_says_why_and_blames_no_network(contents, why, is_offline, tmp_path, request):
    if is_offline:
        request.getfixturevalue("offline")
    contents(tmp_path) if callable(contents) else (tmp_path / "config.json").write_text(contents)
    message = refused(load_fp32, str(tmp_path))
    assert why in message
    assert not any(word in message for word in ("network", "HF_HUB_OFFLINE", "check the name", "huggingface.co"))


def test_the_attention_asked_for_is_taken():
    model = loading.load_model(BaseConfig(TINY_MODEL), torch.float32, attention="eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["granite_swa", "granitemoe_swa"])
def test_a_model_without_sdpa_is_loaded_with_the_attention_that_it_has(kind, tmp_path):
    granite(kind).save_pretrained(tmp_path)
    assert load_fp32(str(tmp_path)).config._attn_implementation == "eager"
    assert loading.untested(str(tmp_path)) is None
    for asked in ("sdpa", "flash_attention_2"):
        with pytest.raises(
            UserError, match=f"--attn {asked}: .* no such attention for {kind} models; use --attn eager"
        ):
            loading.load_model(BaseConfig(str(tmp_path), attention=asked), torch.float32, asked)


def test_a_type_that_is_not_tested_is_said(tmp_path):
    MistralConfig().save_pretrained(tmp_path)
    assert "is a mistral model: not tested" in str(loading.untested(str(tmp_path)))
    assert loading.untested(TINY_MODEL) is None


def test_four_bits_without_bitsandbytes_are_refused(monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--4bit-quantization: bitsandbytes is not installed"):
        loading.load_model(BaseConfig(TINY_MODEL, quantize_4bit=True), torch.float32)


@needs_bitsandbytes
def test_four_bits_hold_the_linear_layers_and_neither_head_nor_embedding():
    import bitsandbytes

    model = loading.load_model(BaseConfig(TINY_MODEL, quantize_4bit=True), torch.float32)
    layers = adapters.linear_layers(model)
    assert len(layers) == 28
    assert all(isinstance(layer, bitsandbytes.nn.Linear4bit) for layer in layers.values())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert not isinstance(head, bitsandbytes.nn.Linear4bit)
    assert head.weight.dtype == embedding.weight.dtype == torch.float32
    assert head.weight.data_ptr() == embedding.weight.data_ptr()


@needs_bitsandbytes
def test_four_bits_of_a_model_that_has_no_layer_for_them_are_refused(tmp_path):
    """Falcon's layers are of a class of their own, which transformers leaves as it is."""
    config = FalconConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert loading.four_bit_layers(str(tmp_path)) == set()
    with pytest.raises(UserError, match=r"--4bit-quantization: .*falcon models in 4 bits; leave it out"):
        loading.load_model(BaseConfig(str(tmp_path), quantize_4bit=True), torch.float32)


@needs_bitsandbytes
def test_what_transformers_reads_past_a_layer_is_not_in_four_bits(tmp_path):
    config = MambaConfig(hidden_size=64, num_hidden_layers=1, state_size=8, vocab_size=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = loading.load_model(BaseConfig(str(tmp_path), quantize_4bit=True), torch.float32)
    expected = {f"backbone.layers.0.mixer.{name}" for name in ("in_proj", "x_proj")}
    assert loading.four_bit_layers(str(tmp_path)) == expected == loading._in_four_bits(model)
    assert model(input_ids=torch.arange(8)[None], use_cache=False).logits.isfinite().all()


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_that_is_stored_in_four_bits_is_held_in_the_runs_precision(dtype, tmp_path):
    made_for = torch.bfloat16 if dtype == torch.float32 else torch.float32
    loading.load_model(BaseConfig(TINY_MODEL, quantize_4bit=True), made_for).save_pretrained(tmp_path)
    model = loading.load_model(BaseConfig(str(tmp_path)), dtype)
    layers = adapters.linear_layers(model)
    assert loading._in_four_bits(model) == {*layers}
    assert {layer.compute_dtype for layer in layers.values()} == {dtype}
    assert {p.dtype for p in model.parameters()} == {dtype, torch.uint8}
    assert logits_of(model).dtype == dtype


@needs_bitsandbytes
@pytest.mark.skipif(not MAPS.is_file(), reason="needs /proc")
def test_a_four_bit_model_lets_go_of_its_files(tmp_path):
    """What is not quantised is a view of the mapped file, and keeps all of it in memory."""
    load_fp32(TINY_MODEL).save_pretrained(tmp_path)
    whole = load_fp32(str(tmp_path))
    assert str(tmp_path) in MAPS.read_text()
    del whole
    gc.collect()
    model = loading.load_model(BaseConfig(str(tmp_path), quantize_4bit=True), torch.float32)
    assert str(tmp_path) not in MAPS.read_text()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_four_bit_model_can_be_scored_and_then_trained(dtype):
    model = loading.load_model(BaseConfig(TINY_MODEL, quantize_4bit=True), dtype)
    adapted = adapters.attach(model, LoraConfig(rank=2))
    labels = TOKENS.roll(-1, 1)
    adapted.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        first, second = (summed_nats(model, TOKENS, labels) for _ in range(2))
    assert first == second
    adapted.train()
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        nats = summed_nats(model, TOKENS, labels)
    nats.backward()
    torch.testing.assert_close(nats.detach(), first, rtol=2e-2, atol=0)
    assert adapters.untrained(adapters.low_rank_updates(adapted)) == []


@needs_bitsandbytes
def test_four_bits_stay_near_the_model_they_round():
    exact = logits_of(load_fp32(TINY_MODEL))
    rounded = logits_of(loading.load_model(BaseConfig(TINY_MODEL, quantize_4bit=True), torch.float32))
    assert 0 < (rounded - exact).norm() < 0.5 * exact.norm()
    agreement = F.cosine_similarity(rounded.flatten(), exact.flatten(), dim=0)
    assert agreement > 0.9
