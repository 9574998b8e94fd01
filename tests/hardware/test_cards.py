"""The card that a preset is for, where it is not in the machine."""

from dataclasses import replace

import pytest
from devices import CPU, RTX_3060, RTX_4090

from granite_scu.hardware import machine as machines
from granite_scu.hardware import presets
from granite_scu.hardware.presets import CARDS, absent, card_of


@pytest.mark.parametrize("name", CARDS)
def test_the_card_of_each_preset_is_one_that_takes_it(name):
    assert presets.PRESETS[name].fits(card_of(name))
    if presets.PRESETS[name].pattern is None:
        assert card_of(name).memory_gb < 17  # of any card, a small one


@pytest.mark.parametrize(
    ("here", "preset", "gpus", "accelerator", "planned"),
    [
        (CPU, "gpu_4090", None, "auto", card_of("gpu_4090")),
        (CPU, "gpu_4090", 3, "auto", replace(card_of("gpu_4090"), count=3)),
        (CPU, "gpu_a30x2", 1, "auto", replace(card_of("gpu_a30x2"), count=1)),
        (RTX_3060, "gpu_4090", None, "auto", card_of("gpu_4090")),
        (RTX_4090, "gpu_4090", 1, "auto", None),
        (RTX_4090, "gpu_4090", RTX_4090.count + 1, "auto", replace(RTX_4090, count=RTX_4090.count + 1)),
        (RTX_3060, "conservative", None, "auto", None),
        (CPU, "gpu_4090", None, "cpu", None),
        (CPU, "cpu", None, "auto", None),
        (CPU, None, None, "auto", None),
    ],
)
def test_a_card_is_planned_for_where_it_is_not_here(machine, here, preset, gpus, accelerator, planned):
    machine(here)
    assert absent(preset, accelerator, gpus) == planned


def test_what_is_installed_here_says_nothing_of_a_card_elsewhere(machine, monkeypatch):
    machine(CPU)
    monkeypatch.setattr(machines, "find_spec", lambda name: None)  # no Triton
    assert machines.compiles(card_of("gpu_4090"), here=False)
    assert not machines.compiles(card_of("gpu_4090"))
