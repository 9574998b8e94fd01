"""The card that a preset is for, where it is not in the machine."""

import pytest
from devices import CPU, RTX_3060, RTX_4090

from granite_scu.hardware import machine as machines
from granite_scu.hardware import presets
from granite_scu.hardware.cards import CARDS, absent


@pytest.mark.parametrize("name", [name for name in presets.PRESETS if name != "cpu"])
def test_the_card_of_each_preset_is_one_that_takes_it(name):
    assert presets.PRESETS[name].fits(CARDS[name])
    if presets.PRESETS[name].pattern is None:
        assert CARDS[name].memory_gb < 17  # of any card, a small one


@pytest.mark.parametrize(
    ("here", "preset", "accelerator", "planned"),
    [
        (CPU, "gpu_4090", "auto", True),
        (RTX_3060, "gpu_4090", "auto", True),
        (RTX_4090, "gpu_4090", "auto", False),
        (RTX_3060, "conservative", "auto", False),
        (CPU, "gpu_4090", "cpu", False),
        (CPU, "cpu", "auto", False),
        (CPU, None, "auto", False),
    ],
)
def test_a_card_is_planned_for_where_it_is_not_here(machine, here, preset, accelerator, planned):
    machine(here)
    assert absent(preset, accelerator) == (CARDS[preset] if planned else None)


def test_what_is_installed_here_says_nothing_of_a_card_elsewhere(machine, monkeypatch):
    machine(CPU)
    monkeypatch.setattr(machines, "find_spec", lambda name: None)  # no Triton
    assert machines.compiles(CARDS["gpu_4090"], here=False)
    assert not machines.compiles(CARDS["gpu_4090"])
