"""Every command and setting that the five guides print for a card fits that card, as it is printed.

The letters are those of docs/guides/tuning-guides.md. What a guide leaves open is our default, so that activations are
recomputed where they would not fit. A guide that names a range is taken at its upper end; the length of B's model
is 512.
"""

from dataclasses import replace

import devices
import pytest

from granite_scu.cli import script_flags
from granite_scu.hardware import machine as machines
from granite_scu.hardware.detection import Device
from granite_scu.training import memory_budget

RTX_3070 = devices.gpu("NVIDIA GeForce RTX 3070", 7.8, (8, 6))

COMMANDS = [
    ("G", RTX_3070, "--fp16 --batch-size 8 --max-steps 1000"),  # "8 GB and more"
    ("G", RTX_3070, "--4bit-quantization --batch-size 2 --lora-r 8 --gradient-accumulation-steps 16"),
    ("G", devices.RTX_4090, "--bf16 --multi-gpu --batch-size 4 --gradient-accumulation-steps 8 --torch-compile"),
    ("G", devices.RTX_4090, "--bf16 --batch-size 16 --torch-compile"),
    ("G", devices.A100_40, "--bf16 --batch-size 32 --torch-compile"),
    ("G", devices.RTX_3080, "--fp16 --4bit-quantization --batch-size 4 --lora-r 8"),
    ("T", devices.A30X2, "--bf16 --multi-gpu --batch-size 28 --block-size 1024"),
    ("T", devices.RTX_3090, "--bf16 --batch-size 20 --block-size 1024"),
    ("T", devices.A100_40, "--bf16 --batch-size 32 --block-size 2048"),  # the guide: 32 to 64 on 40 and 80 GB
    ("T", devices.A100, "--bf16 --batch-size 64 --block-size 2048"),
    ("T", devices.RTX_4090, "--bf16 --batch-size 24 --block-size 1024"),
    ("T", devices.T4, "--fp16 --batch-size 12 --block-size 768"),
    ("T", devices.A40, "--bf16 --batch-size 30 --block-size 1024"),
    ("T", devices.V100, "--fp16 --batch-size 12 --block-size 1024"),
    ("T", devices.RTX_4080, "--bf16 --batch-size 12 --block-size 1024"),
    ("H", devices.RTX_4090, "--bf16 --batch-size 20 --num-workers 8"),
    ("H", devices.A6000, "--bf16 --batch-size 16 --num-workers 8"),
    ("H", devices.RTX_3090, "--bf16 --batch-size 12 --num-workers 6"),
    ("H", RTX_3070, "--batch-size 4 --gradient-accumulation-steps 4 --gradient-checkpointing"),
    ("Q", devices.T4, "--fp16 --batch-size 16 --num-workers 2"),
    ("B", RTX_3070, "--bf16 --batch-size 16 --block-size 512"),  # 8 to 12 GB
    ("B", devices.RTX_3060, "--bf16 --batch-size 24 --block-size 512"),
    ("B", devices.RTX_5080, "--bf16 --batch-size 32 --block-size 512"),  # 16 to 24 GB
    ("B", devices.RTX_4090, "--bf16 --batch-size 48 --block-size 512"),
    ("B", devices.RTX_5090, "--bf16 --batch-size 64 --block-size 512"),  # 32 to 48 GB
    ("B", devices.A6000, "--bf16 --batch-size 96 --block-size 512"),
    ("B", devices.H100, "--bf16 --batch-size 128 --block-size 512"),
]


def _case(guide: str, card: Device, flags: str):
    # A second or two each; G alone is of this very model, and 8 GB the card that fills first.
    marks = () if (guide, card, flags) == COMMANDS[0] else pytest.mark.slow
    return pytest.param(card, flags, marks=marks, id=f"{guide}: {card.name} {flags}")


@pytest.mark.parametrize(("card", "flags"), [_case(*row) for row in COMMANDS])
def test_a_command_of_a_guide_fits_its_card(machine, monkeypatch, card, flags):
    machine(card)
    request = script_flags.translate(flags.split())[0].request()
    found = machines.resolve_request(request)
    allowed = found.memory_limit(request.run.memory_fraction)
    settled = memory_budget.with_checkpointing_settled(request, found)
    assert memory_budget.predict(settled, found).total <= allowed, memory_budget.advice(settled, found)
    if settled.base.gradient_checkpointing and request.base.gradient_checkpointing is None:
        without = replace(settled, base=replace(settled.base, gradient_checkpointing=False))
        assert memory_budget.predict(without, found).total > allowed  # recomputed for want of room alone
