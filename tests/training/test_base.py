"""What a run settles of its machine once the base model is known."""

from pathlib import Path

import pytest
import torch
from devices import AMX, CPU

from granite_scu.cli.script_flags import translate
from granite_scu.config.settings import TINY_MODEL
from granite_scu.hardware import detection
from granite_scu.model import flops, loading, step_time
from granite_scu.training.base import Base, settle_machine
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
