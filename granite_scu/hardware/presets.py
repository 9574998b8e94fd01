"""Presets: a configuration layer for each card, in ``configs/hardware``, and which of them a machine takes."""

import difflib
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from granite_scu.config import shipped
from granite_scu.config.errors import UserError

if TYPE_CHECKING:  # torch takes seconds, and a wrong name is refused without it
    from granite_scu.hardware.detection import Device

AUTO = "auto"

SMALLEST, SMALL = 8.5, 12.5
"""GiB up to which a card has very little, and little, memory for a model of this size."""

PART = 0.8
"""Share of a card's memory below which a device that has its name is a part of one, as MIG and vGPU make them."""


@dataclass(frozen=True)
class Preset:
    """Which devices a preset is for.

    Attributes:
        cards: in words.
        pattern: found in the name of such a device; None for a preset that names no card.
        memory_gb: what such a device has, from and up to, in GiB as the driver tells it.
        kind: ``cuda`` or ``cpu``.
        card: the smallest or the commonest of them as its driver describes it, see ``detection.gpu``: what a plan needs
            to know of a card that is not here. Empty for a CPU.
    """

    cards: str
    pattern: str | None
    memory_gb: tuple[float, float] = (0, math.inf)
    kind: str = "cuda"
    card: tuple[Any, ...] = ()

    def fits(self, device: "Device") -> bool:
        """Whether this device is one of those."""
        low, high = self.memory_gb
        if self.pattern is not None:
            low = max(low, PART * self.card[1])
        named = self.pattern is None or re.search(self.pattern, device.name, re.IGNORECASE)
        return device.kind == self.kind and bool(named) and low <= device.memory_gb < high


PRESETS = {
    "gpu_t4": Preset("Tesla T4, 16 GB", r"\bT4\b", card=("Tesla T4", 15.0, (7, 5))),
    "gpu_v100": Preset("Tesla V100, 16 or 32 GB", r"\bV100", card=("Tesla V100-SXM2-16GB", 16.0, (7, 0))),
    "gpu_a10": Preset("A10 and A10G, 24 GB", r"\bA10G?\b", card=("NVIDIA A10", 22.0, (8, 6))),
    "gpu_3080": Preset(
        "RTX 3080, 10 GB", r"RTX 3080(?! Ti| Laptop)", (0, 11), card=("NVIDIA GeForce RTX 3080", 9.6, (8, 6))
    ),
    "gpu_4080": Preset("RTX 4080, 16 GB", r"RTX 4080(?! Laptop)", card=("NVIDIA GeForce RTX 4080", 15.6, (8, 9))),
    "gpu_3090": Preset("RTX 3090, 24 GB", r"RTX 3090", card=("NVIDIA GeForce RTX 3090", 23.6, (8, 6))),
    "gpu_4090": Preset("RTX 4090, 24 GB", r"RTX 4090(?! Laptop)", card=("NVIDIA GeForce RTX 4090", 23.5, (8, 9))),
    "gpu_a6000": Preset("RTX A6000, 48 GB", r"RTX A6000", card=("NVIDIA RTX A6000", 47.5, (8, 6))),
    "gpu_a30x2": Preset("A30, 24 GB, one or several", r"\bA30\b", card=("NVIDIA A30", 23.5, (8, 0), 2)),
    "gpu_a40": Preset("A40, 48 GB", r"\bA40\b", card=("NVIDIA A40", 44.4, (8, 6))),
    "gpu_a100_40": Preset("A100, 40 GB", r"\bA100\b", (0, 50), card=("NVIDIA A100-SXM4-40GB", 39.4, (8, 0))),
    "gpu_a100_80": Preset("A100, 80 GB", r"\bA100\b", (50, 100), card=("NVIDIA A100-SXM4-80GB", 79.0, (8, 0))),
    "gpu_h100": Preset("H100, 80 or 94 GB", r"\bH100\b", card=("NVIDIA H100 80GB HBM3", 79.1, (9, 0))),
    "gpu_h200": Preset(
        "H200 and GH200, 141 and 144 GB", r"\bG?H200\b", (120, math.inf), card=("NVIDIA H200", 139.8, (9, 0))
    ),
    "gpu_b200": Preset("B200 and B300, 180 GB and more", r"\bG?B[23]00\b", card=("NVIDIA B200", 178.0, (10, 0))),
    "gpu_5090": Preset("RTX 5090, 32 GB", r"RTX 5090(?! Laptop)", card=("NVIDIA GeForce RTX 5090", 31.4, (12, 0))),
    "gpu_rtx50": Preset(
        "RTX 50 with 16 GB", r"RTX 50[5-9]0", (14, 20), card=("NVIDIA GeForce RTX 5080", 15.5, (12, 0))
    ),
    "gpu_5070": Preset(
        "RTX 5070 and others of RTX 50 with 12 GB",
        r"RTX 50[5-9]0",
        (11, 14),
        card=("NVIDIA GeForce RTX 5070", 11.5, (12, 0)),
    ),
    "gpu_2080_ti": Preset("RTX 2080 Ti, 11 GB", r"RTX 2080 Ti", card=("NVIDIA GeForce RTX 2080 Ti", 10.8, (7, 5))),
    "gpu_low_mem": Preset(
        "RTX 3060 and others with 9 to 12 GB", None, (SMALLEST, SMALL), card=("NVIDIA GeForce RTX 3060", 11.8, (8, 6))
    ),
    "gpu_8gb": Preset(
        "RTX 4060 and others with 6 to 8 GB", None, (5, SMALLEST), card=("NVIDIA GeForce RTX 4060", 7.6, (8, 9))
    ),
    "conservative": Preset(
        "any other with 12 GB and more", None, (5, math.inf), card=("NVIDIA GeForce RTX 4060 Ti", 15.6, (8, 9))
    ),
    "cpu": Preset("a machine without a GPU", None, kind="cpu"),
}
"""Cards by name, and three by memory alone, which ``auto`` takes where no name fits."""

CARDS = tuple(name for name, preset in PRESETS.items() if preset.card)
"""Presets that are for a card."""


def folder() -> Path:
    """Where the presets are."""
    return shipped.folder() / "hardware"


def named(text: str) -> str:
    """The preset that a text names, also as ``4090``, ``RTX-4090`` or ``rtx4090``.

    Raises:
        UserError: there is none of that name, or there are several.
    """
    if text in PRESETS:
        return text
    alike = [name for name in PRESETS if _plain(text) and _plain(name) == _plain(text)]
    begun = [name for name in PRESETS if _plain(text) and _plain(name).startswith(_plain(text))]
    begun = [name for name in begun if not name.endswith("_ti")]  # another card than the one without
    if len(alike or begun) == 1:
        return (alike or begun)[0]
    if begun:
        raise UserError(f"--hardware {text}: there are {' and '.join(begun)}; choose one of them")
    plain = {_plain(name): name for name in PRESETS}
    close = difflib.get_close_matches(text, PRESETS, 1, 0.8) or difflib.get_close_matches(_plain(text), plain, 1, 0.8)
    hint = f"did you mean {plain.get(close[0], close[0])}? " if close else ""
    other = f"for another card gpu_8gb (up to 8 GB), gpu_low_mem (up to {SMALL:g} GB) or conservative (more)"
    raise UserError(f"--hardware {text}: no such preset; {hint}choose {AUTO}, {', '.join(PRESETS)}; {other}")


def _plain(text: str) -> str:
    return re.sub(r"nvidia|geforce|rtx|gpu|[^a-z0-9]", "", text.lower())


def path(name: str) -> Path:
    """The file of a preset.

    Raises:
        UserError: there is none of that name.
    """
    return folder() / f"{named(name)}.yaml"


def settings(name: str) -> dict[str, Any]:
    """What a preset sets, by group."""
    return yaml.safe_load(path(name).read_text(encoding="utf-8"))


def choose(device: "Device") -> str:
    """The preset for a device: that of its card, or else one that its memory allows."""
    if device.kind == "cpu":
        return "cpu"
    of_its_card = next((name for name, preset in PRESETS.items() if preset.pattern and preset.fits(device)), None)
    if of_its_card:
        return of_its_card
    return for_memory(device.memory_gb, device.supports_bf16)


def for_memory(gpu_memory_gb: float, bf16: bool = True) -> str:
    """The preset for a card of which only the memory is known, in GB: of the smallest known card with that much.

    Of those for little memory, and of one without ``bf16``, it names no precision.
    """
    if gpu_memory_gb <= SMALLEST:
        return "gpu_8gb"
    if gpu_memory_gb <= SMALL:
        return "gpu_low_mem"
    sizes = (
        (120, "gpu_h200"),
        (70, "gpu_a100_80"),
        (44, "gpu_a40"),
        (36, "gpu_a100_40"),
        (23, "gpu_3090"),
        (20, "gpu_a10"),
    )
    return next((name for least, name in sizes if bf16 and gpu_memory_gb >= least), "conservative")


def mismatch(name: str | None, device: "Device") -> str | None:
    """A warning in one line, where a preset is for other devices than this one, and another would fit it better."""
    if name is None or PRESETS[name].fits(device) or name == choose(device):
        return None
    has = f"{device.name} with {device.memory_gb:.1f} GiB"
    return (
        f"--hardware {name}: made for {PRESETS[name].cards}, and this is {has}; --hardware {choose(device)} is for it"
    )


def card_of(name: str) -> "Device":
    """The card that one of ``CARDS`` is for."""
    from granite_scu.hardware.detection import gpu  # late: torch

    return gpu(*PRESETS[name].card)


def absent(name: str | None, accelerator: str, gpus: int | None = None) -> "Device | None":
    """The card that a preset is for, where a plan asks for it and this machine has no such card, or fewer of them.

    Args:
        name: as ``--hardware``.
        accelerator: as ``--accelerator``: who names the CPU means this machine.
        gpus: as ``--gpus``.
    """
    from granite_scu.hardware.detection import detect  # late: torch

    if name not in CARDS or accelerator == "cpu":
        return None
    here, preset = detect(accelerator), PRESETS[name]
    is_here = preset.fits(here) if preset.pattern else here.kind == "cuda"
    if is_here and here.count >= (gpus or 1):
        return None
    card = here if is_here else card_of(name)
    return replace(card, count=gpus or card.count)
