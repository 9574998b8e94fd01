"""The fixtures of the package's tests, as far as these need them."""

from pathlib import Path

import pytest
from conftest import (  # noqa: F401
    _no_log_of_another_file,
    _no_log_of_another_test,
    _nothing_of_the_user,
    bf16,
    fit,
    make_batches,
    make_module,
    no_bf16,
    small_granite,
)


@pytest.fixture(autouse=True)
def _processes_find_research(monkeypatch):
    """It is not installed: a process that a test starts looks for it where the checkout is."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
