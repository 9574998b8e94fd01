"""Run folders made by hand, as a run writes them."""

import json
import math
from pathlib import Path

import numpy as np


def record(step: int, **changes) -> dict:
    """A tick's record, with all its fields."""
    fields = {
        "step": step,
        "tokens": 4096 * step,
        "data_bpt": 6.4,
        "param_bpt": 0.13,
        "s": 0.02,
        "s_ema": 0.02,
        "s_target": 0.02,
        "error": 0.0,
        "lambda": 1.0,
        "p_term": 0.0,
        "i_term": 0.0,
        "saturated": False,
        "held": False,
        "lr": 1e-4,
        "grad_norm": 1.0,
        "skipped": 0,
        "tokens_per_s": 2000.0,
        "gpu_memory_gb": None,
    }
    return fields | changes


def rising(ticks: int = 40) -> list[dict]:
    """S rises over two decades into its setpoint while lambda climbs from 0.1 to 10."""
    return [
        record(
            10 * k,
            data_bpt=6.4 - 0.5 * (1 - math.exp(-k / 8)),
            param_bpt=0.13 * (1 - math.exp(-k / 8)) ** 2,
            s=0.02 * (1 - math.exp(-k / 8)) ** 2,
            s_ema=0.019 * (1 - math.exp(-k / 8)) ** 2,
            **{"lambda": 10 ** (2 * k / ticks - 1)},
        )
        for k in range(1, ticks + 1)
    ]


def holding(ticks: int = 40) -> list[dict]:
    """Drift comes to its budget of 2 % from above while lambda climbs; S is only measured."""
    return [
        record(10 * k, s_ema=None, s_target=None, drift=0.02 + 0.02 * math.exp(-k / 8), drift_target=0.02,
               drift_bpt=0.06, data_bpt=3 + math.exp(-k / 8), **{"lambda": 1.1**k})
        for k in range(1, ticks + 1)
    ]  # fmt: skip


def course(low: float, high: float, ticks: int = 12) -> list[dict]:
    """A history in which S, lambda, and bits go from the one to the other."""
    path = np.geomspace(low, high, ticks)
    return [
        record(
            7 * (k + 1), data_bpt=value, param_bpt=value, s=min(value, 0.9999), s_ema=min(value, 0.9999),
            s_target=min(high, 0.9999), tokens_per_s=value, saturated=k % 3 == 0, held=k % 5 == 0,
            **{"lambda": value},
        )
        for k, value in enumerate(path.tolist())
    ]  # fmt: skip


def settings(**changes) -> dict:
    """What ``training_config.json`` has."""
    groups = {
        "base": {"name": "tiny-granite-h"},
        "lora": {"rank": 16},
        "optimizer": {"learning_rate": 1e-3},
        "data": {"path": "stdlib-docs"},
        "control": {"controller": "pi", "target_s": 0.02, "lambda_init": None},
        "run": {"output_dir": "runs/some"},
        "trainer": {"max_steps": 400, "detect_anomaly": False, "profiler": None},
        "plan": {"steps": 400},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "machine": {"device": {"kind": "cpu", "name": "AMD EPYC"}},
        "seed": 42,
    }
    for name, value in changes.items():
        groups[name] = groups.get(name, {}) | value if isinstance(value, dict) else value
    return groups


def write_run(folder: Path, history: list[dict], config: dict, settings: dict, validations=(), metrics=None) -> Path:
    """A run folder: finished with ``metrics``, else cut off. Validations are (step, bits)."""
    folder.mkdir(parents=True)
    if metrics is None:
        (folder / "scu_history.jsonl").write_text("".join(json.dumps(each) + "\n" for each in history))
    else:
        (folder / "scu_history.json").write_text(json.dumps(history))
        (folder / "scu_metrics.json").write_text(json.dumps(metrics))
    (folder / "scu_config.json").write_text(json.dumps(config))
    (folder / "training_config.json").write_text(json.dumps(settings))
    (folder / "logs" / "csv").mkdir(parents=True)
    write_csv(folder / "logs" / "csv" / "metrics.csv", validations)
    return folder


def write_csv(file: Path, validations) -> None:
    """The CSV log with these (step, bits per token): the logger counts a step as done after its validation."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [f",{step - 1},{bits}\n" for step, bits in validations]
    file.write_text("scu/s,step,val_bpt\n0.02,10,\n" + "".join(rows))


METRICS = {
    "steps": 400,
    "tokens": 1638400,
    "base_test_bpt": 6.5,
    "adapter_test_bpt": 5.85,
    "test_tokens": 14088,
    "final_val_bpt": 5.9,
    "wall_time_s": 119.3,
    "tokens_per_s": 2000.0,
    "control": {"settling_time": 130, "overshoot": 0.04, "iae": 0.1, "in_band": 0.96},
    "stopped": {"reason": "max_steps", "step": 400},
}


def finished_run(folder: Path) -> Path:
    """The folder of a finished run under PI."""
    config = {"controller": "pi", "target_s": 0.02}
    return write_run(folder, rising(), config, settings(), [(100, 6.1), (200, 5.95), (300, 5.92)], METRICS)


def held_run(folder: Path) -> Path:
    """The folder of a finished run that held drift at 2 %: kept is the adapter of step 300, which came nearest."""
    drift = {"budget": 0.02, "share": 0.021, "tokens": 512, "within": True, "lambda": 45.0}
    metrics = METRICS | {"drift": drift, "best_val_step": 300, "best_val_bpt": 5.92, "s_target": None}
    validated = [(100, 6.1), (200, 5.95), (300, 5.92)]
    return write_run(folder, holding(), {"controller": "pi", "target_s": None}, settings(), validated, metrics)
