"""Run folders made by hand, finished and cut off."""

from pathlib import Path

import pytest
from folders import METRICS, holding, rising, seeking, settings, write_run


@pytest.fixture
def finished(tmp_path) -> Path:
    """The folder of a finished run under PI."""
    folder = tmp_path / "finished"
    config = {"controller": "pi", "target_s": 0.02}
    return write_run(folder, rising(), config, settings(), [(100, 6.1), (200, 5.95), (300, 5.92)], METRICS)


@pytest.fixture
def moved(tmp_path) -> Path:
    """The folder of a finished run under PI whose setpoint held-out text moved."""
    config = {"controller": "pi", "target_s": None}
    asked = settings(control={"target_s": "auto"})
    metrics = METRICS | {"control": {"iae": None, "in_band": None}}
    return write_run(tmp_path / "moved", seeking(), config, asked, [(100, 6.1)], metrics)


@pytest.fixture
def held(tmp_path) -> Path:
    """The folder of a finished run that held drift at 2 %: kept is the adapter of step 300, which came nearest."""
    drift = {"budget": 0.02, "share": 0.021, "tokens": 512, "within": True, "lambda": 45.0}
    metrics = METRICS | {"drift": drift, "best_val_step": 300, "s_target": None}
    validated = [(100, 6.1, 0.035), (200, 5.95, 0.026), (300, 5.92, 0.021)]
    return write_run(
        tmp_path / "held", holding(), {"controller": "pi", "target_s": None}, settings(), validated, metrics
    )


@pytest.fixture
def cut_off(tmp_path) -> Path:
    """The folder of a run that crashed in the middle of writing a record."""
    folder = write_run(tmp_path / "cut-off", rising()[:12], {"controller": "pi"}, settings(), [(100, 6.1)])
    with (folder / "scu_history.jsonl").open("a") as lines:
        lines.write('{"step": 130, "s": 0.0')
    return folder
