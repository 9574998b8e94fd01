"""Run folders made by hand, finished and cut off."""

from pathlib import Path

import pytest
from folders import finished_run, held_run, rising, settings, write_run


@pytest.fixture
def finished(tmp_path) -> Path:
    return finished_run(tmp_path / "finished")


@pytest.fixture
def held(tmp_path) -> Path:
    return held_run(tmp_path / "held")


@pytest.fixture
def cut_off(tmp_path) -> Path:
    """The folder of a run that crashed in the middle of writing a record."""
    folder = write_run(tmp_path / "cut-off", rising()[:12], {"controller": "pi"}, settings(), [(100, 6.1)])
    with (folder / "scu_history.jsonl").open("a") as lines:
        lines.write('{"step": 130, "s": 0.0')
    return folder
