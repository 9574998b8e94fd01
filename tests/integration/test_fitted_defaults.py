"""A run that gives no numbers: they are fitted to its data, and it continues with them."""

import json

import torch
from ferries import ASKED, write_chats
from safetensors.torch import load_file

from granite_scu.training import defaults


def test_a_run_of_few_chats_continues_exactly_though_its_numbers_are_not_given(launch, tmp_path, monkeypatch):
    chats, whole, stopped = write_chats(tmp_path / "chats.jsonl", ASKED[:1]), tmp_path / "whole", tmp_path / "stopped"
    flags = ("--model", "tiny-granite-h", "--accelerator", "cpu", "--data-dir", chats, "--save-steps", 4)
    code, _, err = launch(*flags, "--max-steps", 8, "--output-dir", whole)
    assert (code, err) == (0, "")
    settings = json.loads((whole / "training_config.json").read_text(encoding="utf-8"))
    assert settings["control"]["controller"] == "none" and settings["optimizer"]["learning_rate"] > 1e-3
    assert settings["trainer"]["accumulate_grad_batches"] == 1 and settings["data"]["block_size"] < 1024
    # In another folder, so that no configuration but the checkpoint's own says them, and by a version with other rules.
    monkeypatch.setattr(defaults, "RATE", 1e-3)
    monkeypatch.setattr(defaults, "WARMUP", 0.5)
    resumed = ("--resume-from-checkpoint", whole / "checkpoint-4", "--max-steps", 8, "--output-dir", stopped)
    (whole / "config.yaml").unlink()
    code, out, err = launch(*flags, *resumed)
    assert (code, err) == (0, "") and "changed since the checkpoint" not in out
    ends = [load_file(folder / "checkpoint-8" / "adapter_model.safetensors") for folder in (whole, stopped)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
