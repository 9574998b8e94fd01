"""Merged models against PEFT's own merge and against the adapter, and what is refused."""

import importlib.util
import json
import os
import re
import shutil
import signal
from collections import namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import yaml
from outcomes import refusal
from rounding import OF_SMALL, assert_rounded
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from granite_scu.cli.console import make_console
from granite_scu.config.errors import RunFailed, UserError
from granite_scu.config.settings import TINY_MODEL, BaseConfig
from granite_scu.data.sources.documents import Conversation
from granite_scu.evaluation.bpt.texts import Texts
from granite_scu.evaluation.bpt.windows import ScoringCorpus, cut
from granite_scu.export import merge as merging
from granite_scu.export import merge_check
from granite_scu.model import adapters, loading, saved_adapter
from granite_scu.model.adapters import load_adapted

needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")

TOKENS = torch.arange(2, 40)[None]


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS, use_cache=False).logits


@pytest.fixture
def make_adapter(small_granite, tmp_path):
    """Saves a LoRA adapter with random factors for a base, as PEFT does."""

    def make(base=small_granite, **settings) -> Path:
        torch.manual_seed(1)
        config = {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "q_proj", "input_linear"]}
        model = peft.get_peft_model(plain(base), peft.LoraConfig(**(config | settings), task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        folder = tmp_path / "adapter"
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def merge(small_granite, tmp_path, monkeypatch):
    """Merges an adapter without the comparison, which wants a tokenizer; returns the merged model's folder."""
    monkeypatch.setattr(merging.Merger, "_write_tokenizer", lambda self, folder: None)

    def run(adapter, base=small_granite, quantize_4bit=False, in_fp32=False) -> Path:
        out = tmp_path / "models" / ("merged in fp32" if in_fp32 else "merged")
        config = BaseConfig(str(base), quantize_4bit=quantize_4bit)
        merger = merging.Merger(saved_adapter.find(adapter), config, out, in_fp32)
        merger.check_out(overwrite=False)
        merger.merge(make_console(), check=False)
        return out

    return run


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"out_proj": 3, "input_linear": 16}},
        {"target_modules": r".*layers\.1\..*q_proj|.*in_proj"},
    ],
    ids=["plain", "rslora", "patterns", "regex"],
)
def test_it_is_what_peft_makes_of_it(small_granite, make_adapter, merge, settings):
    folder = make_adapter(**settings)
    expected = peft.PeftModel.from_pretrained(plain(small_granite), folder)
    with_adapter = logits(expected)
    reference = expected.merge_and_unload().state_dict()
    merged = plain(merge(folder))
    for name, tensor in merged.state_dict().items():
        assert_rounded(tensor, reference[name], 8)  # a sum over the rank, and onto the base
    assert_rounded(logits(merged), with_adapter, OF_SMALL)
    assert (logits(plain(small_granite)) - with_adapter).abs().max() > 0.01


def test_a_base_in_bf16_is_rounded_once_or_not_at_all(small_granite, make_adapter, merge, tmp_path):
    base, name = tmp_path / "bf16", "model.layers.0.mamba.in_proj"
    plain(small_granite).bfloat16().save_pretrained(base, max_shard_size="20KB")
    folder = make_adapter(base)
    weight = tensors_of(base)[f"{name}.weight"]
    merged, factors = tensors_of(merge(folder, base)), load_file(folder / saved_adapter.WEIGHTS)
    a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"].float() for factor in "AB")
    assert merged[f"{name}.weight"].dtype == torch.bfloat16
    assert torch.equal(merged[f"{name}.weight"], (weight.float() + 2 * (b @ a)).bfloat16())
    exact = merge(folder, base, in_fp32=True)
    tensors = tensors_of(exact)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert torch.equal(tensors[f"{name}.weight"], weight.float() + 2 * (b @ a))
    assert plain(exact).dtype == torch.float32  # which from_pretrained takes from the configuration
    index = json.loads((exact / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("kind", ["sharded", "unprefixed", "both"])
def test_the_files_of_the_base_stay_as_they_are(small_granite, make_adapter, merge, tmp_path, kind):
    """In several files with an index, or with names that leave out the model's prefix; of both, what is trained on."""
    base = tmp_path / kind
    if kind == "both":  # a model that was saved over another
        other = plain(small_granite)
        other.get_input_embeddings().weight.data.mul_(2)
        other.save_pretrained(base, max_shard_size="20KB")
        shutil.copy2(Path(small_granite, "model.safetensors"), base)
    else:
        plain(small_granite).save_pretrained(base, **({"max_shard_size": "20KB"} if kind == "sharded" else {}))
    if kind == "unprefixed":
        tensors = load_file(base / "model.safetensors")
        unprefixed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(unprefixed, base / "model.safetensors", {"format": "pt"})
    folder = make_adapter(base)
    out = merge(folder, base)
    shards = "*.safetensors" if kind == "sharded" else "model.safetensors"
    files = {path.name: {*load_file(path)} for path in base.glob(shards)}
    assert {path.name: {*load_file(path)} for path in out.glob("*.safetensors")} == files
    assert (len(files) > 1) == (kind == "sharded")
    for index in base.glob("*.index.json") if kind == "sharded" else ():
        assert (out / index.name).read_bytes() == index.read_bytes()
    expected = logits(peft.PeftModel.from_pretrained(plain(base), folder))
    assert_rounded(logits(plain(out)), expected, OF_SMALL)


@pytest.mark.parametrize(
    ("kind", "settings", "experts", "stored"),
    [
        ("granitemoe", {}, ["experts.gate_up_proj", "experts.down_proj"], "block_sparse_moe.input_linear.weight"),
        ("mixtral", {}, ["experts.gate_up_proj", "experts.down_proj"], "block_sparse_moe.experts.3.w1.weight"),
        ("nemotron_h", {"layers_block_type": ["mlp", "attention"], "head_dim": 8}, None, "mixer.up_proj.weight"),
    ],
)
def test_what_transformers_renames_or_joins_is_stored_as_before(
    make_adapter, merge, tmp_path, kind, settings, experts, stored
):
    """Nemotron-H's files have another prefix, and a mixture's one matrix for each expert, or another name."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    base = tmp_path / kind
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **settings)).save_pretrained(base)
    folder = make_adapter(base, target_modules=["q_proj", "up_proj"], target_parameters=experts)
    out = merge(folder, base)
    before, after = tensors_of(base), tensors_of(out)
    assert before.keys() == after.keys() and any(name.endswith(stored) for name in before)
    assert all((before[name] != after[name]).any() for name in before if name.endswith(stored))
    adapted = peft.PeftModel.from_pretrained(plain(base), folder)
    assert_rounded(logits(plain(out)), logits(adapted.merge_and_unload()), OF_SMALL)


@needs_bitsandbytes
@pytest.mark.parametrize("whole", ["lm_head", "o_proj"], ids=["the head", "another layer"])
def test_of_a_qlora_run_the_base_is_what_4_bits_made_of_it(small_granite, make_adapter, merge, monkeypatch, whole):
    from bitsandbytes import functional

    monkeypatch.setattr(loading, "UNQUANTISED", ["lm_head", whole])
    folder = make_adapter(target_modules=["in_proj"])
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch.cuda, "is_available", lambda: True)  # and the CPU was asked for
        merged = load_file(merge(folder, quantize_4bit=True) / "model.safetensors")
    quantised = loading.load_model(BaseConfig(small_granite, quantize_4bit=True), torch.bfloat16)
    factors = load_file(folder / saved_adapter.WEIGHTS)
    untouched = load_file(Path(small_granite) / "model.safetensors")
    layers = adapters.linear_layers(quantised)
    assert any(name.endswith("o_proj") for name in layers)  # no adapter on it, in 4 bits all the same
    for name, layer in layers.items():
        weight = untouched[f"{name}.weight"]
        if not name.endswith(whole):
            weight = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        if name.endswith("in_proj"):
            a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
            weight = weight + 2 * (b @ a)
        assert torch.equal(merged[f"{name}.weight"], weight), name
    assert torch.equal(merged["model.embed_tokens.weight"], untouched["model.embed_tokens.weight"])


def test_a_qlora_run_is_not_merged_without_bitsandbytes(make_adapter, merge, monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"bitsandbytes is not installed; pip install 'granite-scu\[quant\]'"):
        merge(make_adapter(), quantize_4bit=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["o_proj"]}, "modules_to_save = ['o_proj']"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"target_modules": ["embed_tokens"]}, "adapts model.embed_tokens"),
        ({"target_modules": ["conv1d"], "r": 64}, "adapts model.layers.0.mamba.conv1d"),
        ({"saved as": {"init_lora_weights": "pissa"}}, "init_lora_weights = 'pissa', which changes the base"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(make_adapter, merge, settings, words):
    saved_as = settings.pop("saved as", {})
    folder = make_adapter(**settings)
    config = json.loads((folder / saved_adapter.ADAPTER_CONFIG).read_text())
    (folder / saved_adapter.ADAPTER_CONFIG).write_text(json.dumps(config | saved_as))
    assert words in refusal(merge, folder)


def test_an_adapter_for_another_base_is_refused_before_anything_is_written(
    small_granite, make_adapter, merge, tmp_path
):
    folder = make_adapter()
    other = tmp_path / "other"
    model = plain(small_granite)
    model.config.shared_intermediate_size = 48
    AutoModelForCausalLM.from_config(model.config).save_pretrained(other)
    with pytest.raises(
        UserError, match=r"does not fit .*input_linear.lora_B.weight would have to be 96 x 4 and is 64 x 4"
    ):
        merge(folder, other)
    config = json.loads((folder / saved_adapter.ADAPTER_CONFIG).read_text())
    (folder / saved_adapter.ADAPTER_CONFIG).write_text(
        json.dumps(config | {"base_model_name_or_path": "ibm-granite/a"})
    )
    with pytest.raises(UserError, match=r"was trained on ibm-granite/a, and not on --model ibm-granite/b"):
        saved_adapter.base_of(saved_adapter.find(folder), "ibm-granite/b")
    (folder / saved_adapter.TRAINING_CONFIG).write_text(json.dumps({"base": {"name": "ibm-granite/b"}}))
    with pytest.raises(UserError, match=r"ibm-granite/a, and .* trained on ibm-granite/b; one of the files is of"):
        saved_adapter.find(folder)
    assert "is a whole model, no adapter; train on it by --model" in refusal(saved_adapter.find, small_granite)
    assert not (tmp_path / "models").exists()


def test_the_output_folder_is_refused_where_something_is_in_it(small_granite, make_adapter, tmp_path, monkeypatch):
    adapter = saved_adapter.find(make_adapter())

    def check(out, overwrite=False) -> str:
        return refusal(merging.Merger(adapter, BaseConfig(small_granite), out).check_out, overwrite)

    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("years of work")
    assert "choose another folder" in check(full)
    assert "no merged model of ours" in check(full, overwrite=True)
    (full / merging.RECORD).write_text("{}")
    assert "holds thesis.txt, which no merge has written" in check(full, overwrite=True)
    (tmp_path / "link").symlink_to(full)
    assert "is a link; name the folder that it leads to" in check(tmp_path / "link")
    assert "a disk is mounted there" in check(Path("/proc"))
    assert "is a file, and not a folder" in check(full / "thesis.txt")
    assert "merged from" in check(adapter.folder, overwrite=True)
    assert "merged from" in check(tmp_path, overwrite=True)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**20))
    assert "1.0 MiB are free" in check(tmp_path / "new")
    in_fp32 = merging.Merger(adapter, BaseConfig(small_granite), tmp_path / "new", True)
    size = Path(small_granite, "model.safetensors").stat().st_size  # in fp32 already
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(size + merging.SPARE))
    in_fp32.check_out(overwrite=False)  # just enough
    assert (full / "thesis.txt").read_text() == "years of work"


@pytest.fixture
def on_random_text(monkeypatch):
    """Compares on a few windows of random tokens, since the small models have no tokenizer."""
    generator = np.random.default_rng(0)
    sequences = [generator.integers(2, 60, 33, dtype=np.int32) for _ in range(6)]
    targets = [np.ones(32, bool)] * 6
    corpus = ScoringCorpus("random", ["text"] * 6, sequences, np.full(6, 32), targets, cut(np.full(6, 32), 32, 32))
    monkeypatch.setattr(merge_check, "_held_out", lambda adapter, tokenizer: (corpus, "random text"))
    monkeypatch.setattr(merging.Merger, "_write_tokenizer", lambda self, folder: None)


def test_a_wrong_merge_is_not_kept(small_granite, make_adapter, tmp_path, monkeypatch, on_random_text):
    """Whatever the reason; here one matrix was forgotten."""
    merger = merging.Merger(saved_adapter.find(make_adapter()), BaseConfig(small_granite), tmp_path / "merged")
    right = merging.Merger._merged

    def forgetful(self, name, weight, *rest):
        return weight if "q_proj" in name else right(self, name, weight, *rest)

    with monkeypatch.context() as broken:
        broken.setattr(merging.Merger, "_merged", forgetful)
        with pytest.raises(RunFailed, match=r"the merge is wrong: on random text .* in fp32"):
            merger.merge(make_console())
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}
    record = merger.merge(make_console())
    check = record["check"]
    assert check["in_fp32"] < merge_check.AGREES < abs(check["base_bpt"] - check["adapter_bpt"])
    assert record["matrices"] == len(merger.updates)


def test_a_card_that_fp32_does_not_fit_leaves_that_to_the_cpu(
    small_granite, make_adapter, tmp_path, monkeypatch, on_random_text
):
    def load(base, adapters, dtype, device):
        if device.type == "cuda":
            raise torch.OutOfMemoryError
        return load_adapted(base, adapters, dtype, device)

    monkeypatch.setattr(merge_check, "load_adapted", load)
    adapter, base = saved_adapter.find(make_adapter()), BaseConfig(small_granite)
    merger, (corpus, _) = merging.Merger(adapter, base, tmp_path / "merged"), merge_check._held_out(adapter, None)
    write = partial(merger._write_weights_to_check, console=make_console())
    found = merge_check._worst_in_fp32(adapter, base, corpus, tmp_path / "fp32", write, torch.device("cuda"))
    assert found < merge_check.AGREES


@pytest.mark.parametrize("quantize_4bit", [False, pytest.param(True, marks=needs_bitsandbytes)])
def test_what_rounding_takes_is_said_and_what_is_wrong_refused(
    small_granite, make_adapter, tmp_path, monkeypatch, capsys, on_random_text, quantize_4bit
):
    """Rounding down to powers of two in place of bf16, so that it takes more than a few per cent."""
    base, out = tmp_path / "bf16", tmp_path / "merged"
    plain(small_granite).bfloat16().save_pretrained(base)
    file = base / "model.safetensors"
    free = file.stat().st_size + 2 * sum(t.numel() for t in load_file(file).values()) + merging.SPARE
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(free))
    adapter = saved_adapter.find(make_adapter(base))
    merger = merging.Merger(adapter, BaseConfig(str(base), quantize_4bit=quantize_4bit), out)
    right = merging.Merger._merged

    def coarse(self, name, weight, factors, dtype, in_fp32):
        merged = right(self, name, weight, factors, dtype, in_fp32)
        mantissa, exponent = torch.frexp(merged.float())
        return merged if in_fp32 else torch.ldexp(0.5 * mantissa.sign(), exponent).to(merged.dtype)

    monkeypatch.setattr(merging.Merger, "_merged", coarse)
    check = merger.merge(make_console())["check"]
    assert out.is_dir() and not check["is_merged"] and check["in_fp32"] < merge_check.AGREES
    assert "fp32" not in {path.name for path in out.iterdir()}
    said = capsys.readouterr().out
    assert f"{check['difference']:+.4f}" in said and "--dtype fp32" in said
    free -= 1
    with pytest.raises(RunFailed, match="make room"):
        merger.merge(make_console())
    free += 1
    wrong = lambda self, name, weight, *rest: coarse(self, name, 1.1 * weight, *rest)  # noqa: E731
    monkeypatch.setattr(merging.Merger, "_merged", wrong)
    merger = merging.Merger(adapter, BaseConfig(str(base), quantize_4bit=quantize_4bit), tmp_path / "wrong")
    with pytest.raises(RunFailed, match="the merge is wrong"):
        merger.merge(make_console())
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("merged", "kept", "is_merged"),
    [
        ([9.0, 8.0, 7.0], 1.0, True),
        ([9.02, 8.01, 7.03], 0.98, True),  # as PEFT's own
        ([9.2, 8.2, 7.2], 0.8, False),
        ([8.8, 7.8, 6.8], 1.2, False),
        ([11.0, 6.0, 7.9], 0.7, True),  # by chance, as far as three windows can tell
        ([np.nan, 8.0, 7.0], np.nan, False),
    ],
)
def test_the_share_of_the_gain_is_judged_beyond_chance(merged, kept, is_merged):
    nats = 10 * np.log(2) * np.array([[10.0, 9.0, 8.0], [9.0, 8.0, 7.0], merged])
    found = merge_check.Comparison(nats, np.array([10, 10, 10]))
    assert found.gain == pytest.approx(1.0)
    assert found.is_merged == is_merged
    assert 1 - found.difference == pytest.approx(kept, nan_ok=True)
    assert found.kept == (pytest.approx(kept) if found.gain > 2 * found.error else None)


@pytest.mark.parametrize(
    ("text", "adapter_bpt", "warned"),
    [(merge_check.OWN, 9.1, True), (merge_check.OWN, 9.0, False), ("Python's documentation", 9.1, False)],
)
def test_an_adapter_that_is_worse_than_its_base_on_the_runs_own_text_is_warned_of(text, adapter_bpt, warned):
    check = {"is_merged": True, "text": text, "base_bpt": 9.0, "adapter_bpt": adapter_bpt}
    assert ["worse than the base" in line for line in merging._warnings({"check": check})] == [True] * warned


@pytest.mark.parametrize(("base", "named"), [("ibm-granite/granite-4.0-h-1b", True), ("my-folder", False)])
def test_the_card_names_the_base_for_the_hub_where_it_is_there(base, named):
    record = {"base_model": base, "adapter": "mine", "adapter_sha256": "0", "matrices": 1, "merged_into": "x"}
    of = {"model_type": "granitemoehybrid", "chats": True}
    front = yaml.safe_load(merging._card(record | {"check": None}, of).split("---\n")[1])
    assert front.get("base_model") == (base if named else None)


def test_what_a_killed_merge_left_is_removed_and_a_running_one_is_not(small_granite, make_adapter, tmp_path):
    merger = merging.Merger(saved_adapter.find(make_adapter()), BaseConfig(small_granite), tmp_path / "merged")
    ready, told = os.pipe()
    if not (child := os.fork()):
        with merging._owned(tmp_path / f".merged.{os.getpid()}.tmp"):
            os.write(told, b"!")
            signal.pause()
        os._exit(1)
    os.read(ready, 1)
    try:
        with pytest.raises(UserError, match="another merge is writing it"):
            merger.check_out(overwrite=False)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    (tmp_path / ".merged.1.old").mkdir()
    (tmp_path / ".merged.1.old" / merging.RECORD).write_text("the model that was to be replaced")
    merger.check_out(overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "merged"}
    assert (tmp_path / "merged" / merging.RECORD).read_text() == "the model that was to be replaced"


@pytest.mark.parametrize("what", ["base", "adapter"])
def test_what_is_not_finite_is_blamed(small_granite, make_adapter, merge, tmp_path, what):
    """An adapter whose product overflows has diverged; NaN in the base's files is not the adapter's."""
    base = Path(shutil.copytree(small_granite, tmp_path / "base"))
    folder = make_adapter(base)
    file = folder / saved_adapter.WEIGHTS if what == "adapter" else base / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mamba.in_proj.weight"
    spoil = {name: float("nan")} if what == "base" else {key: 3e38 for key in tensors if "in_proj" in key}
    save_file(
        tensors | {key: torch.full_like(tensors[key], value) for key, value in spoil.items()}, file, {"format": "pt"}
    )
    words = f"--model {base}: {name} holds NaN" if what == "base" else "the adapter has diverged"
    with pytest.raises((UserError, RunFailed), match=re.escape(words)):
        merge(folder, base)


def test_text_of_which_nothing_is_learned_is_none_to_compare_on():
    messages = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so", "weight": 0}
    with pytest.raises(UserError, match="mine: nothing of it is learned"):
        merge_check._beginning(
            Texts("mine", [Conversation("mine", "so", messages)]), loading.load_tokenizer(TINY_MODEL), 64
        )
