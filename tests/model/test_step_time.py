"""The time of a step: kept for a machine and a shape; no figure of this machine is expected."""

import json
import math
from dataclasses import replace

import pytest
import torch

from granite_scu.config.settings import BaseConfig, LoraConfig
from granite_scu.model import loading, memory, step_time
from granite_scu.model.step_time import on_cpu


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """However busy this machine is."""
    monkeypatch.setattr(step_time, "BUSY", math.inf)


@pytest.mark.parametrize(("dtype", "recomputed"), [(torch.float32, False), (torch.bfloat16, "selective")])
def test_of_a_busy_machine_no_pace_is_kept(small_granite, tmp_path, monkeypatch, dtype, recomputed):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(step_time, "BUSY", 0)
    base = BaseConfig(small_granite, gradient_checkpointing=recomputed)
    setting = memory.Setting(base, LoraConfig(), dtype, 1, 16, "cpu")
    assert on_cpu(loading.load_model_config(small_granite), setting, []).step > 0
    assert not (tmp_path / "granite-scu" / "paces.json").exists()


def test_a_pace_is_kept_for_a_machine_and_a_setting_and_leaves_the_seed_alone(small_granite, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, file = loading.load_model_config(small_granite), tmp_path / "granite-scu" / "paces.json"
    setting = memory.Setting(BaseConfig(small_granite), LoraConfig(dropout=0.5), torch.float32, 2, 16, "cpu")
    drawn = torch.get_rng_state()
    pace = on_cpu(config, setting, ["a processor", 2])
    assert 0 < pace.forward < pace.step and torch.equal(torch.get_rng_state(), drawn)
    written = file.stat().st_mtime_ns
    assert on_cpu(config, setting, ["a processor", 2]) == pace and file.stat().st_mtime_ns == written
    on_cpu(config, setting, ["a processor", 1])
    on_cpu(config, replace(setting, block_size=32), ["a processor", 2])
    assert len(json.loads(file.read_text())) == 3


@pytest.mark.parametrize("damage", [3, {"step": 1.0}])
def test_what_is_no_pace_is_measured_again(small_granite, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, file = loading.load_model_config(small_granite), tmp_path / "granite-scu" / "paces.json"
    setting = memory.Setting(BaseConfig(small_granite), LoraConfig(), torch.float32, 1, 16, "cpu")
    on_cpu(config, setting, [])
    (name,) = json.loads(file.read_text())
    file.write_text(json.dumps({name: damage}))
    on_cpu(config, setting, [])
    found = json.loads(file.read_text())[name]
    assert set(found) == {"step", "forward"} and found != damage
