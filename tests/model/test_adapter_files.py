"""The configuration of an adapter from anywhere, before PEFT sees it."""

import json
import time
from pathlib import Path

import pytest
import torch
from outcomes import refusal
from safetensors.torch import save_file

from granite_scu.config.errors import UserError
from granite_scu.config.settings import BaseConfig
from granite_scu.model import loading, saved_adapter
from granite_scu.model.adapter_files import modules_of, run_of
from granite_scu.model.adapters import load_adapted

GOOD = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
SLOW = r"(([a-z_]+|\w+|[a-z0-9_.]+)+)+!"


@pytest.fixture
def adapter(tmp_path):
    """Writes an adapter with these settings; returns its folder."""

    def write(**settings):
        text = json.dumps(GOOD | {"base_model_name_or_path": "tiny-granite-h"} | settings)
        (tmp_path / "adapter_config.json").write_text(text)
        layer = "base_model.model.model.layers.4.self_attn.q_proj"
        save_file(
            {f"{layer}.lora_A.weight": torch.ones(4, 192), f"{layer}.lora_B.weight": torch.ones(192, 4)},
            tmp_path / "adapter_model.safetensors",
        )
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"r": 10**9}, "r must be a rank, from 1 to 65,536, and is 1000000000"),
        ({"r": 0}, "r must be a rank"),
        ({"r": "4"}, "r must be a rank"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a finite number"),
        ({"target_modules": [1]}, "target_modules must be a list of layers' names"),
        ({"rank_pattern": {SLOW: 2}}, "rank_pattern must be ranks by layers' names"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern must be ranks by layers' names"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be numbers by layers' names"),
        ({"exclude_modules": SLOW}, "exclude_modules must be a list of layers' names"),
        ({"layers_to_transform": [0], "layers_pattern": SLOW}, "layers_pattern must be layers' names"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform must be numbers of layers"),
        ({"target_modules": ["q_proj"] * 600_000}, "target_modules must be a list of layers' names"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path must be a name"),
    ],
)
def test_settings_that_would_be_dear_or_end_in_a_raw_error_are_refused_by_name(adapter, settings, words):
    assert words in refusal(saved_adapter.find, adapter(**settings))


def test_a_configuration_that_is_nested_without_end_is_refused(adapter):
    folder = adapter()
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is damaged"):
        saved_adapter.find(folder)


def test_a_pattern_of_names_is_never_matched(adapter):
    """It could take for ever; the file itself has the names."""
    folder, start = adapter(target_modules=SLOW), time.monotonic()
    found = saved_adapter.find(folder)
    assert list(found.updates("tiny-granite-h")) == ["model.layers.4.self_attn.q_proj"]
    load_adapted(found.base, {"one": folder, "other": folder}, torch.float32, torch.device("cpu"))
    assert time.monotonic() - start < 30


def test_what_is_scored_is_checked_alike(adapter):
    with pytest.raises(UserError, match=r"one: its adapter does not fit .* r must be a rank"):
        load_adapted(BaseConfig("tiny-granite-h"), {"one": adapter(r=10**9)}, torch.float32, torch.device("cpu"))


def test_the_layers_are_those_that_the_file_has_factors_of():
    names = ["base_model.model.a.b.lora_A.weight", "base_model.model.a.b.lora_B.weight", "base_model.model.c.bias"]
    assert modules_of(names) == ["a.b"]


@pytest.mark.parametrize("place", ["final", "checkpoint-400", "best"])
def test_the_run_of_an_adapter_is_found_from_inside_its_folder_and_through_a_link(tmp_path, monkeypatch, place):
    folder = tmp_path / "run" / place
    folder.mkdir(parents=True)
    (tmp_path / "run" / "training_config.json").write_text("{}")
    (tmp_path / "mine").symlink_to(folder)
    monkeypatch.chdir(folder)
    for name in (folder, Path("."), tmp_path / "mine"):
        assert run_of(name) == tmp_path / "run"


def test_a_local_base_of_the_folder_that_the_run_was_started_in_may_be_the_one_that_is_named(adapter):
    folder = adapter(base_model_name_or_path="models/granite")
    (folder / "models" / "granite").mkdir(parents=True)
    (folder / "training_config.json").write_text(json.dumps({"working_folder": "."}))
    found = saved_adapter.find(folder)
    assert saved_adapter.base_of(found, "ibm-granite/granite-4.0-h-1b").name == "ibm-granite/granite-4.0-h-1b"


@pytest.mark.parametrize("kernels", ["cuda", "hub"])
def test_a_run_in_compiled_kernels_is_used_without_them_too(adapter, kernels):
    folder = adapter()
    (folder / "training_config.json").write_text(json.dumps({"base": {"name": "tiny-granite-h", "kernels": kernels}}))
    loading.load_model(saved_adapter.find(folder).base, torch.float32)
