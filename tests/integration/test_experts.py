"""A mixture whose experts are adapted, as a user would train it: from the first step to the merged model."""

import json

import pytest
import torch
from outcomes import done

from granite_scu.cli import main as commands
from granite_scu.model import saved_adapter

pytestmark = pytest.mark.slow

FEW = ("--accelerator", "cpu", "--precision", "fp32", "--max-steps", 6, "--control-every", 2, "--warmup-steps", 0)
FEW += ("--batch-size", 2, "--block-size", 64, "--gradient-accumulation-steps", 1, "--eval-iters", 2)
FEW += ("--learning-rate", "1e-2", "--lora-r", 4)


@pytest.fixture(scope="module")
def folder(launch, topics, small_mixture, tmp_path_factory):
    """A run that adapts the experts, rank-stabilised, under a controller."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    asked = (*FEW, "--model", small_mixture, "--data-dir", topics, "--lora-experts", "--rslora", "--save-steps", 3)
    asked += ("--target-s", "10%")
    done(launch, *asked, "--output-dir", folder)
    return folder


def test_its_experts_are_trained_and_its_adapter_is_pefts(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == ["experts.down_proj", "experts.gate_up_proj"]
    assert config["use_rslora"] and config["r"] == 4
    adapter = saved_adapter.find(folder)
    assert {update.scale for update in adapter.updates(adapter.base.name).values()} == {32 / 4**0.5}
    with adapter.open() as file:
        factors = [file.get_tensor(name) for name in file.keys() if ".lora_B." in name]  # noqa: SIM118 (no mapping)
    assert len(factors) == 14 and all(bool(factor.any()) for factor in factors)
    metrics = json.loads((folder / "scu_metrics.json").read_text())
    assert metrics["adapter_test_bpt"] < metrics["base_test_bpt"]
    ticks = json.loads((folder / "scu_history.json").read_text())
    assert all(tick["param_bpt"] > 0 for tick in ticks)


def test_resumed_it_ends_bit_for_bit_the_same(folder, launch, tmp_path):
    done(launch, "--resume-from-checkpoint", folder / "checkpoint-3", "--output-dir", tmp_path / "resumed")
    name = "adapter_model.safetensors"
    assert (tmp_path / "resumed" / name).read_bytes() == (folder / name).read_bytes()


def test_merged_it_has_the_adapters_bits_per_token(folder, call, tmp_path):
    from transformers import AutoModelForCausalLM

    code, _, err = call(commands.main, "merge", folder, "--out", tmp_path / "merged")
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "merged" / "granite_scu_merge.json").read_text())
    check = record["check"]
    assert record["matrices"] == 10 + 2 * 2 * 6
    assert abs(check["difference"]) < 0.01 * (check["base_bpt"] - check["adapter_bpt"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.config.num_local_experts == 6


def test_gone_on_from_it_keeps_the_experts_and_the_scale(folder, launch, topics, small_mixture, tmp_path):
    asked = (*FEW, "--model", small_mixture, "--data-dir", topics, "--adapter", folder)
    done(launch, *asked, "--output-dir", tmp_path / "more")
    lora = json.loads((tmp_path / "more" / "training_config.json").read_text())["lora"]
    assert (lora["experts"], lora["rslora"]) == (True, True)
    before, after = (json.loads((path / "scu_metrics.json").read_text()) for path in (folder, tmp_path / "more"))
    assert after["start_test_bpt"] == pytest.approx(before["adapter_test_bpt"], abs=1e-4)
