"""The card of each preset as its driver describes it: what a plan needs to know of a card that is not here."""

from dataclasses import replace

from granite_scu.hardware import presets
from granite_scu.hardware.detection import Device, detect, gpu

CARDS = {
    "gpu_t4": gpu("Tesla T4", 15.0, (7, 5)),
    "gpu_v100": gpu("Tesla V100-SXM2-16GB", 16.0, (7, 0)),
    "gpu_a10": gpu("NVIDIA A10", 22.0, (8, 6)),
    "gpu_3080": gpu("NVIDIA GeForce RTX 3080", 9.6, (8, 6)),
    "gpu_4080": gpu("NVIDIA GeForce RTX 4080", 15.6, (8, 9)),
    "gpu_3090": gpu("NVIDIA GeForce RTX 3090", 23.6, (8, 6)),
    "gpu_4090": gpu("NVIDIA GeForce RTX 4090", 23.5, (8, 9)),
    "gpu_a6000": gpu("NVIDIA RTX A6000", 47.5, (8, 6)),
    "gpu_a30x2": gpu("NVIDIA A30", 23.5, (8, 0), count=2),
    "gpu_a40": gpu("NVIDIA A40", 44.4, (8, 6)),
    "gpu_a100_40": gpu("NVIDIA A100-SXM4-40GB", 39.4, (8, 0)),
    "gpu_a100_80": gpu("NVIDIA A100-SXM4-80GB", 79.0, (8, 0)),
    "gpu_h100": gpu("NVIDIA H100 80GB HBM3", 79.1, (9, 0)),
    "gpu_h200": gpu("NVIDIA H200", 139.8, (9, 0)),
    "gpu_b200": gpu("NVIDIA B200", 178.0, (10, 0)),
    "gpu_5090": gpu("NVIDIA GeForce RTX 5090", 31.4, (12, 0)),
    "gpu_rtx50": gpu("NVIDIA GeForce RTX 5080", 15.5, (12, 0)),
    "gpu_5070": gpu("NVIDIA GeForce RTX 5070", 11.5, (12, 0)),
    "gpu_2080_ti": gpu("NVIDIA GeForce RTX 2080 Ti", 10.8, (7, 5)),
    "gpu_low_mem": gpu("NVIDIA GeForce RTX 3060", 11.8, (8, 6)),
    "gpu_8gb": gpu("NVIDIA GeForce RTX 4060", 7.6, (8, 9)),
    "conservative": gpu("NVIDIA GeForce RTX 4060 Ti", 15.6, (8, 9)),
}
"""By preset, of several cards or sizes the smallest or the commonest; memory in GiB."""


def absent(preset: str | None, accelerator: str, gpus: int | None = None) -> Device | None:
    """The card that a preset is for, where a plan asks for it and this machine has no such card, or fewer of them.

    Args:
        preset: as ``--hardware``.
        accelerator: as ``--accelerator``: who names the CPU means this machine.
        gpus: as ``--gpus``.
    """
    if preset not in CARDS or accelerator == "cpu":
        return None
    here = detect(accelerator)
    names_a_card = presets.PRESETS[preset].pattern is not None
    is_here = presets.PRESETS[preset].fits(here) if names_a_card else here.kind == "cuda"
    if is_here and here.count >= (gpus or 1):
        return None
    card = here if is_here else CARDS[preset]
    return replace(card, count=gpus or card.count)
