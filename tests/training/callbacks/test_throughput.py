"""Throughput, MFU and the state of a GPU, read from simulated devices."""

import logging
from types import SimpleNamespace

import pytest
import torch
from devices import A100

from granite_scu.hardware.nvml import SENSORS
from granite_scu.hardware.peaks import Peak
from granite_scu.training.callbacks import throughput as monitoring
from granite_scu.training.callbacks.progress import describe
from granite_scu.training.callbacks.shannon_control import ControlTick
from granite_scu.training.callbacks.throughput import Monitor
from granite_scu.training.callbacks.utilisation import JUDGED_TICKS, UtilisationWatch, advice

PEAK = Peak(100e12, "a datasheet")
RECORD = {
    **{"data_bpt": 5.0, "s": 0.02, "s_ema": 0.02, "s_target": 0.02, "lambda": 0.1, "saturated": False, "held": False},
    **{"tokens_per_s": 12345.6, "mfu": 0.1523},
}
SETTINGS = {
    "batch_size": 16, "accumulated": 2, "num_workers": 0, "compile": False, "gradient_checkpointing": True,
    "precision": "bf16-mixed",
}  # fmt: skip


@pytest.fixture
def on_gpu(machine, monkeypatch) -> Monitor:
    machine(A100)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 11 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 18 * 2**30)
    monkeypatch.setattr(monitoring, "read_sensors", lambda: dict(zip(SENSORS, (93, 71, 251.3), strict=True)))
    return Monitor(32, 30e12, PEAK, devices=2, on_gpu=True)


def test_rates_and_mfu_are_those_of_the_time_since_the_last_tick():
    found = Monitor(blocks_per_step=32, flops_per_step=30e12, peak=PEAK).read(steps=10, seconds=20.0)
    assert found["samples_per_s"] == 16 and found["mfu"] == pytest.approx(0.15)
    assert all(value is None for name, value in found.items() if name.startswith("gpu_"))
    shared = Monitor(32, 30e12, PEAK, devices=4)
    assert shared.mfu(10, 20.0) == pytest.approx(0.15 / 4)
    assert shared.mfu(10, 0.0) is None and shared.read(10, 0.0)["samples_per_s"] is None


def test_a_gpu_tells_memory_and_sensors(on_gpu):
    found = on_gpu.read(10, 20.0)
    assert [found[f"gpu_memory_{name}"] for name in ("now_gb", "gb", "total_gb")] == [11, 18, 79]
    assert (found["gpu_utilisation"], found["gpu_temperature_c"], found["gpu_power_w"]) == (93, 71, 251.3)


def test_the_line_can_be_searched_for_mfu(on_gpu):
    line = describe(RECORD | on_gpu.read(1, 1.0) | {"mfu": 0.1523})
    assert "12,346 tok/s  mfu 15.2%  11.0/18.0/79.0 GiB  93 %  71 C  251 W" in line
    assert describe(RECORD).endswith("12,346 tok/s")  # on a CPU, MFU is of a rate that nobody knows


def test_plain_lora_has_neither_s_nor_lambda_in_the_line():
    assert "S 2.00% (S* 2.00%)  lambda 0.1" in describe(RECORD)
    assert describe(RECORD | {"lambda": 0.0}) == "loss 5.000 bits/token  12,346 tok/s"


def test_the_summary_is_of_the_whole_run(on_gpu):
    history = [{"gpu_utilisation": 90, "gpu_temperature_c": 60, "gpu_power_w": 200.0}, {"gpu_utilisation": None}]
    history.append({"gpu_utilisation": 80, "gpu_temperature_c": 75, "gpu_power_w": 300.0})
    found = on_gpu.summary(100, 200.0, history)
    assert found["mfu"] == pytest.approx(0.075) and found["samples_per_s"] == 16
    assert (found["gpu_utilisation"], found["gpu_temperature_c"], found["gpu_power_w"]) == (85, 75, 250)
    assert (found["peak_tflops"], found["peak_source"], found["gpu_memory_total_gb"]) == (100, "a datasheet", 79)


def test_no_mfu_is_shown_that_would_be_more_than_the_peak():
    of_a_hundred = Monitor(32, 1e12, Peak(100e12, "measured"))
    assert of_a_hundred.mfu(100, 1.0) == 1 and of_a_hundred.mfu(101, 1.0) is None


# A word where MFU is low.


def judged(caplog, mfus: list[float]) -> list[str]:
    trainer = SimpleNamespace(is_global_zero=True)
    watch = UtilisationWatch(0.2, SETTINGS)
    with caplog.at_level(logging.WARNING, "granite_scu"):
        for step, mfu in enumerate(mfus):
            device = {"gpu_memory_gb": 11.2, "gpu_memory_total_gb": 24.0, "gpu_utilisation": 97}
            watch.on_tick(ControlTick({"step": step, "mfu": mfu, **device}, 0.0), trainer, None)
    return [record.getMessage() for record in caplog.records]


def test_a_run_below_its_preset_hears_of_it_once(caplog):
    (said,) = judged(caplog, [0.001] + [0.08] * 3 * JUDGED_TICKS)
    assert said.startswith(f"step {JUDGED_TICKS}: mfu 8.0% is below the 20% to be expected: ")
    assert "11.2 of 24.0 GiB are used, so raise --batch-size 32" in said and "--torch-compile" in said


@pytest.mark.parametrize(
    "mfus",
    [
        [0.001] + [0.25] * 20,  # the first tick loads and compiles
        [0.25] * (1 + JUDGED_TICKS) + [0.01] * 20,
        [0.01] * JUDGED_TICKS,  # too short to tell
    ],
)
def test_a_run_that_does_well_hears_nothing(caplog, mfus):
    assert judged(caplog, mfus) == []


@pytest.mark.parametrize(
    ("device", "settings", "first"),
    [
        ({"gpu_utilisation": 40}, {}, "the GPU is busy for 40 % of the time only"),
        ({"gpu_memory_gb": 12.0, "gpu_memory_total_gb": 24.0}, {}, "12.0 of 24.0 GiB"),
        ({"gpu_memory_gb": 12.0, "gpu_memory_total_gb": 24.0}, {"accumulated": 1}, "--torch-compile"),
        ({}, {"precision": "32-true"}, "fp32 has half the rate of bf16"),
        ({}, {}, "--torch-compile"),
        ({}, {"compile": True}, "see docs/troubleshooting.md"),
    ],
)
def test_the_likeliest_cause_comes_first(device, settings, first):
    unknown = dict.fromkeys(("gpu_memory_gb", "gpu_memory_total_gb", "gpu_utilisation"))
    assert advice(unknown | device, SETTINGS | settings).startswith(first)
