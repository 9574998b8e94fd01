"""Runs that are planned by given figures, and not by a step that is taken to find them: a third of a short run.

``model`` has the tests of what finds them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def pace(config, setting, machine):
    """In place of ``step_time.on_cpu``. Of fp32 the shorter time, so that on every machine a run is in that."""
    import torch

    from granite_scu.model.step_time import Pace

    seconds = 1e-4 if setting.dtype == torch.float32 else 2e-4
    return Pace(seconds, seconds / 3)


@contextmanager
def no_step_tried() -> Iterator[None]:
    """Meanwhile a step takes the time above and little memory."""
    from granite_scu.model import memory, step_time

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "predict", lambda config, setting: memory.Footprint(1 << 25, 1 << 20, 1 << 25))
        patch.setattr(step_time, "on_cpu", pace)
        yield
