"""What a run settles of its machine once the base model is known."""

import json
from pathlib import Path

import pytest
import torch
from devices import AMX, CPU

from granite_scu.cli.script_flags import translate
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import TINY_MODEL
from granite_scu.hardware import detection
from granite_scu.model import flops, loading, step_time
from granite_scu.training.base import Base, open_base, settle_machine
from granite_scu.training.resume import Resume, with_checkpoint_settings


@pytest.mark.parametrize(
    ("bf16", "flags", "precision"),
    [
        (0.54, (), "32-true"),
        (0.48, (), "bf16-mixed"),  # fp32 is not so much faster that twice the memory is worth it
        (0.54, ("--precision", "bf16"), "bf16-mixed"),
        (0.54, ("--deterministic",), "bf16-mixed"),
    ],
)
def test_a_cpu_trains_in_the_precision_whose_step_was_faster(monkeypatch, bf16, flags, precision):
    monkeypatch.setattr(detection, "detect", lambda accelerator: AMX)
    paces = {torch.bfloat16: bf16, torch.float32: 0.45}
    monkeypatch.setattr(step_time, "on_cpu", lambda config, setting, machine: step_time.Pace(paces[setting.dtype], 1.0))
    layers, _ = translate(["--model", TINY_MODEL, "--data-dir", "stdlib-docs", "--accelerator", "cpu", *flags])
    request = layers.request()
    base = Base(None, loading.known_config(TINY_MODEL), None, flops.measure(TINY_MODEL, request.lora, 64, None))
    _, machine, why = settle_machine(request, base, None)
    assert machine.precision == precision
    told = {"32-true": "--precision fp32: a step measured here takes 0.83 times", "bf16-mixed": "1.07 times"}
    assert len(why) == (not flags) and all(told[precision] in line for line in why)


@pytest.mark.parametrize(
    ("before", "was", "device", "kept"),
    [
        ("cpu", "bf16-mixed", AMX, "bf16-mixed"),
        ("cpu", "bf16-mixed", CPU, None),  # which has no bf16
        ("cuda", "16-mixed", AMX, None),  # a GPU's choice is none for a CPU
    ],
)
def test_a_run_keeps_a_precision_that_its_kind_of_device_chose_and_this_one_has(monkeypatch, before, was, device, kept):
    monkeypatch.setattr(detection, "detect", lambda accelerator: device)
    layers, _ = translate(["--model", TINY_MODEL, "--data-dir", "stdlib-docs", "--accelerator", "cpu"])
    resume = Resume(Path("checkpoint-6"), {"settings": {"device": before, "--precision": was}}, in_place=True)
    assert with_checkpoint_settings(layers.request(), resume).trainer.precision == kept


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_a_block_beyond_a_table_of_positions_is_refused_and_beyond_others_is_not(tmp_path, kind):
    loading.load_tokenizer(TINY_MODEL).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 16}
    config = {"model_type": kind, "max_position_embeddings": 128, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    request = Request.from_dotted({"base.name": str(tmp_path), "data.path": "stdlib-docs", "data.block_size": 256})
    if kind == "llama":
        open_base(request, None, None)
        return
    with pytest.raises(UserError, match=r"--block-size 256: .* has 128 positions; --block-size 128 is the most"):
        open_base(request, None, None)
