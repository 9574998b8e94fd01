"""Judges, once, whether the run uses its device as well as its preset expects."""

import logging
from statistics import median
from typing import Any

import lightning as L

from granite_scu.training.callbacks.shannon_control import ControlTick

log = logging.getLogger(__name__)

JUDGED_TICKS = 5
"""Ticks over which MFU is judged, after a first one in which kernels are loaded, compiled and tuned."""


class UtilisationWatch:
    """Says, once, when the run stays below the MFU that its preset expects, and what to change.

    Args:
        expected: share of the peak.
        settings: of the base model and the data, the run's ``precision``, and the batches ``accumulated`` in a step.
    """

    def __init__(self, expected: float, settings: dict[str, Any]) -> None:
        self.expected, self.settings = expected, settings
        self._judged: list[dict] = []
        self._ticks = 0

    def on_tick(self, tick: ControlTick, trainer: L.Trainer, module: L.LightningModule) -> None:
        record = tick.record
        self._ticks += 1
        if self._ticks == 1 or record["mfu"] is None or len(self._judged) >= JUDGED_TICKS:
            return
        self._judged.append(record)
        if len(self._judged) == JUDGED_TICKS and trainer.is_global_zero:
            reached = median(record["mfu"] for record in self._judged)
            if reached < self.expected:
                remedy = advice(record, self.settings)
                below = f"mfu {reached:.1%} is below the {self.expected:.0%} to be expected"
                log.warning("step %d: %s: %s", record["step"], below, remedy)


def advice(record: dict, settings: dict[str, Any]) -> str:
    """What to change where MFU is low, the most likely first.

    Args:
        record: a tick's, with memory and utilisation.
        settings: ``batch_size``, ``accumulated``, ``num_workers``, ``compile``, ``gradient_checkpointing``,
            ``precision``.
    """
    peak, total, utilisation = record["gpu_memory_gb"], record["gpu_memory_total_gb"], record["gpu_utilisation"]
    found = []
    if utilisation is not None and utilisation < 80:
        workers = f"--num-workers {max(2, 2 * settings['num_workers'])}"
        found.append(f"the GPU is busy for {utilisation} % of the time only, so give it data faster ({workers})")
    if peak and total and peak < 0.8 * total and settings["accumulated"] > 1:  # a larger step would be another run
        bigger = f"--batch-size {2 * settings['batch_size']}"
        found.append(f"{peak:.1f} of {total:.1f} GiB are used, so raise {bigger} and halve the accumulation")
        if settings["gradient_checkpointing"] is True:
            found.append("or try --no-gradient-checkpointing, which computes a quarter less")
    if settings["precision"] == "32-true":
        found.append("fp32 has half the rate of bf16 at most: --precision auto")
    if not settings["compile"]:
        found.append("--torch-compile")
    return "; ".join(found) or "see docs/troubleshooting.md, low utilisation"
