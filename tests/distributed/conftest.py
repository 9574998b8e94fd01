"""Runs of several processes, forks of this one."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _undrawn(no_step_is_tried):
    """Without pictures, a third of a short run."""
    from granite_scu.export import present

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(present, "picture", lambda folder: None)
        yield
