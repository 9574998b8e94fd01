"""The time that is spent training, how fast the run is and how full its device."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import lightning as L
import torch

from granite_scu.hardware.detection import GIB
from granite_scu.hardware.nvml import SENSORS, read_sensors
from granite_scu.hardware.peaks import Peak


class Stopwatch(L.Callback):
    """Runs while training, stands still during validation and checkpoints."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._since: float | None = None
        self._last = (0, 0.0)
        self._began, self._before = time.perf_counter(), 0.0

    @property
    def wall_seconds(self) -> float:
        """Seconds of the whole run so far, those up to a resumed checkpoint among them."""
        return self._before + time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resumed checkpoint among them."""
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return self._elapsed + running

    def rate(self, count: int) -> float:
        """Units of ``count`` (tokens) a second since the last call."""
        (before, then), self._last = self._last, (count, self.seconds)
        passed = self.seconds - then
        return (count - before) / passed if passed > 0 else 0.0

    def start(self) -> None:
        """Continue."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stand still."""
        self._elapsed = self.seconds
        self._since = None

    def state_dict(self) -> dict:
        return {"elapsed": self.seconds, "last": list(self._last), "wall": self.wall_seconds}

    def load_state_dict(self, state: dict) -> None:
        self._elapsed, self._last = state["elapsed"], tuple(state["last"])
        self._before = state["wall"]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.start()

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stop()

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.start()


@dataclass(frozen=True)
class Monitor:
    """Reads throughput, MFU, and the state of the device.

    Attributes:
        blocks_per_step: in an optimizer step, over all devices.
        flops_per_step: operations of an optimizer step, over all devices; see ``model.flops``.
        peak: of one device.
        devices: that train.
        on_gpu: whether they are GPUs; memory and sensors are of this process's.
    """

    blocks_per_step: int
    flops_per_step: float
    peak: Peak
    devices: int = 1
    on_gpu: bool = False

    def mfu(self, steps: float, seconds: float) -> float | None:
        """Share of the peak that so many optimizer steps in that time are.

        None where no time has passed; and where it is above 1: then the peak was measured too low, as on a machine that
        others kept busy at the start, and a share of it means nothing.
        """
        share = steps * self.flops_per_step / (seconds * self.peak.flops * self.devices) if seconds > 0 else None
        return None if share is None or share > 1 else share

    def read(self, steps: int, seconds: float) -> dict[str, Any]:
        """The fields of a tick's record: rates since the last one, memory in GiB, and the sensors.

        Args:
            steps: optimizer steps since the last tick.
            seconds: of training since then.
        """
        return {
            "samples_per_s": steps * self.blocks_per_step / seconds if seconds > 0 else None,
            "mfu": self.mfu(steps, seconds),
            **_memory(self.on_gpu),
            **(read_sensors() if self.on_gpu else dict.fromkeys(SENSORS)),
        }

    def summary(self, steps: int, seconds: float, history: Sequence[dict]) -> dict[str, Any]:
        """The fields of the run's summary; ``history`` are the records of its ticks."""
        return {
            "samples_per_s": steps * self.blocks_per_step / seconds if seconds > 0 else None,
            "mfu": self.mfu(steps, seconds),
            "peak_tflops": self.peak.flops / 1e12,
            "peak_source": self.peak.source,
            "gpu_memory_total_gb": _memory(self.on_gpu)["gpu_memory_total_gb"],
            "gpu_utilisation": _over(mean, history, "gpu_utilisation"),
            "gpu_temperature_c": _over(max, history, "gpu_temperature_c"),
            "gpu_power_w": _over(mean, history, "gpu_power_w"),
        }


def _memory(on_gpu: bool) -> dict[str, float | None]:
    names = ("gpu_memory_now_gb", "gpu_memory_gb", "gpu_memory_total_gb")
    if not on_gpu:
        return dict.fromkeys(names)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    read = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), total)
    return {name: value / GIB for name, value in zip(names, read, strict=True)}


def _over(function: Any, history: Sequence[dict], name: str) -> float | None:
    values = [record[name] for record in history if record.get(name) is not None]
    return function(values) if values else None
