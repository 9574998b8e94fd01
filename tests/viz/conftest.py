"""Run folders made by hand, finished and cut off."""

from pathlib import Path

import pytest
from folders import METRICS, rising, settings, write_run


@pytest.fixture
def finished(tmp_path) -> Path:
    """The folder of a finished run under PI."""
    folder = tmp_path / "finished"
    config = {"controller": "pi", "target_s": 0.02}
    return write_run(folder, rising(), config, settings(), [(100, 6.1), (200, 5.95), (300, 5.92)], METRICS)


@pytest.fixture
def cut_off(tmp_path) -> Path:
    """The folder of a run that crashed in the middle of writing a record."""
    folder = write_run(tmp_path / "cut-off", rising()[:12], {"controller": "pi"}, settings(), [(100, 6.1)])
    with (folder / "scu_history.jsonl").open("a") as lines:
        lines.write('{"step": 130, "s": 0.0')
    return folder
